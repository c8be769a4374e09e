"""The files of a converted folder that are not weights: tokenizer, chat template and generation defaults."""

import logging
import shutil
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.text import load_tokenizer
from jaxserve.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy them from next to the weights, or write out what is inside a GGUF file."""
    if checkpoint.format != "gguf":
        source = Path(checkpoint.path)
        for name in COPIED:
            file = (source if source.is_dir() else source.parent) / name
            if file.is_file():
                shutil.copyfile(file, folder / name)
        return
    try:
        load_tokenizer(checkpoint.path).save(folder)
    except CheckpointError as why:
        log.warning("converted without a tokenizer, so name one with `tokenizer=` when serving: %s", why)
