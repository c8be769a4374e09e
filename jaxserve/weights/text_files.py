"""The files of a converted folder that are not weights: tokenizer, chat template and generation defaults."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text import Tokenizer, load_tokenizer
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
        _write_tokenizer(load_tokenizer(checkpoint.path), folder)
    except CheckpointError as why:
        log.warning("converted without a tokenizer, so name one with `tokenizer=` when serving: %s", why)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The files `load_tokenizer` reads the same tokenizer from."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = dict(tokenizer.named_tokens)
    if tokenizer.chat_template is not None:
        config["chat_template"] = [
            {"name": name, "template": template}
            for name, template in tokenizer.chat_template.templates.items()
        ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": list(tokenizer.eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
