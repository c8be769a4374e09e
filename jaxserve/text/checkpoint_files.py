"""Where a checkpoint keeps its tokenizer: a folder of Hugging Face files, a GGUF file, or the hub."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError
from jaxserve.hub import resolve
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.gguf_tokenizer import TokenizerParts, add_around, parts_from_gguf
from jaxserve.text.tokenizer import Tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint, with its chat template and the tokens that end an answer."""
    local = Path(path).expanduser()
    place = local if local.exists() else Path(resolve(path, revision, weights=False))
    if place.is_file() and place.suffix != ".gguf":
        place = place.parent
    if place.is_dir() and not (place / "tokenizer.json").exists():
        inside = sorted(place.glob("*.gguf"))
        if not inside:
            raise _missing(place)
        place = inside[0]
    parts = parts_from_gguf(place) if place.is_file() else _parts_from_folder(place)
    return Tokenizer(
        parts.backend,
        named_tokens=parts.named_tokens,
        eos_token_ids=parts.eos_token_ids,
        chat_template=ChatTemplate(parts.templates, parts.named_tokens) if parts.templates else None,
    )


def _missing(folder: Path) -> CheckpointError:
    found = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).exists()]
    return CheckpointError(
        "this checkpoint has no tokenizer that can be read; name another place with `tokenizer=`, or save it with "
        "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        file=str(folder), expected="tokenizer.json or a .gguf file", found=", ".join(found) or "neither",
    )  # fmt: skip


def _parts_from_folder(folder: Path) -> TokenizerParts:
    file = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(file))
    except Exception as why:  # the library raises bare Exception
        raise CheckpointError(
            "tokenizer.json is damaged or newer than the tokenizers package; fetch it again or update the package",
            file=str(file), found=str(why),
        ) from why  # fmt: skip
    backend.no_truncation()
    backend.no_padding()
    config = _read(folder / "tokenizer_config.json")
    named = _named_tokens(_read(folder / "special_tokens_map.json"), config)
    _add_missing(backend, config, folder)
    _surround(backend, config, named)
    generation = _read(folder / "generation_config.json") or _read(folder / "config.json")
    return TokenizerParts(backend, named, _eos_ids(backend, generation, named), _templates(folder, config))


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as why:
        raise CheckpointError("a file is not JSON; fetch it again", file=str(file), found=str(why)) from why
    if not isinstance(content, dict):
        raise CheckpointError(
            "a file has another shape", file=str(file), expected="an object", found=type(content).__name__
        )
    return content


def _text(token: Any) -> str | None:
    """Tokens are written as plain text or as {"content": text, ...}."""
    return token.get("content") if isinstance(token, dict) else token


def _named_tokens(special: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    both = {**special, **{key: value for key, value in config.items() if value is not None}}
    named: dict[str, Any] = {name: _text(both[name]) for name in NAMES if both.get(name)}
    extra = both.get("additional_special_tokens") or both.get("extra_special_tokens")
    if isinstance(extra, list):
        named["additional_special_tokens"] = [_text(token) for token in extra]
    elif isinstance(extra, dict):
        named |= {name: _text(token) for name, token in extra.items()}
    return named


def _add_missing(backend: Backend, config: dict[str, Any], folder: Path) -> None:
    """Adds the tokens that only tokenizer_config.json knows; their numbers must come out as it says."""
    listed = {int(index): token for index, token in config.get("added_tokens_decoder", {}).items()}
    known = backend.get_added_tokens_decoder()
    for index in sorted(listed.keys() - known.keys()):
        content = listed[index]["content"]
        flags = {name: value for name, value in listed[index].items() if name in FLAGS}
        backend.add_tokens([AddedToken(content, **flags)])
        if backend.token_to_id(content) != index:
            raise CheckpointError(
                f"added token {content!r} cannot get its number", file=str(folder / "tokenizer_config.json"),
                expected=str(index), found=str(backend.token_to_id(content)),
            )  # fmt: skip


def _surround(backend: Backend, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Heeds add_bos_token and add_eos_token as the Llama-like tokenizer classes of transformers do."""
    generic = config.get("tokenizer_class", "PreTrainedTokenizerFast") == "PreTrainedTokenizerFast"
    wanted = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
    if generic or wanted == {"bos": None, "eos": None}:
        return
    probe = backend.encode("a").tokens
    has = {"bos": probe[0] == named.get("bos_token"), "eos": probe[-1] == named.get("eos_token")}
    add = {name: has[name] if wanted[name] is None else bool(wanted[name]) for name in has}
    if add != has:
        tokens = {name: named.get(f"{name}_token") if add[name] else None for name in add}
        if not any(tokens.values()):
            backend.post_processor = None  # type: ignore[assignment]
        add_around(backend, tokens["bos"], tokens["eos"])


def _eos_ids(backend: Backend, generation: dict[str, Any], named: dict[str, Any]) -> tuple[int, ...]:
    listed = generation.get("eos_token_id")
    ids = list(listed) if isinstance(listed, list) else [listed]
    if "eos_token" in named:
        ids.append(backend.token_to_id(named["eos_token"]))
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int)))


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own goes before tokenizer_config.json, as in transformers."""
    listed = config.get("chat_template") or _read(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(listed, str):
        listed = {"default": listed}
    templates = (
        {entry["name"]: entry["template"] for entry in listed} if isinstance(listed, list) else dict(listed)
    )
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    own = folder / "chat_template.jinja"
    if own.exists():
        templates["default"] = own.read_text(encoding="utf-8")
    return templates
