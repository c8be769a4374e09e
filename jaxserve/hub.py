"""Hugging Face hub names: the local folder a model's files are in, downloaded if need be."""

import re
from pathlib import Path

from jaxserve.errors import CheckpointError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT = ["*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*"]
WEIGHTS = ["*.safetensors"]
UNNEEDED = ["original/*", "onnx/*", "consolidated*"]  # other layouts of the same weights


def resolve(path: str, revision: str | None = None, *, weights: bool = True) -> str:
    """`path` itself if it is there, else the snapshot folder of the hub name it must then be.

    Without `weights` only the small files are fetched: configuration, tokenizer, chat templates.
    """
    local = Path(path).expanduser()
    if path and local.exists():
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} is for hub names, but the model is local", file=path
            )
        return str(local)
    if not NAME.fullmatch(path) or path.endswith((".gguf", ".safetensors")):
        raise CheckpointError("no such file or folder; is the path right?", file=path)
    # Half a second to import, and local checkpoints need none of it.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return huggingface_hub.snapshot_download(
            path,
            revision=revision,
            allow_patterns=TEXT + WEIGHTS if weights else TEXT,
            ignore_patterns=UNNEEDED,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as why:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{path!r} is no local folder and could not be fetched from the Hugging Face hub{at}; check the name, "
            "log in if the model is gated, or without a network download it elsewhere "
            f"(`hf download {path}`) and give the folder",
            found=f"{type(why).__name__}: {str(why).strip().splitlines()[0] if str(why).strip() else ''}",
        ) from why
