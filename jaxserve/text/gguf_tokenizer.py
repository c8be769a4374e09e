"""The tokenizer inside a GGUF file, rebuilt as a `tokenizers.Tokenizer`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from jaxserve.errors import CheckpointError
from jaxserve.text.pretokenizers import ADDS_BOS, EXPRESSIONS, WHOLE_WORDS, pre_tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
# Control tokens that end a turn or a document, for files that name only one of them.
ENDINGS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
           "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]", "<|END_OF_TURN_TOKEN|>",
           "<\uff5cend\u2581of\u2581sentence\uff5c>"}  # fmt: skip


@dataclass(frozen=True)
class TokenizerParts:
    """What a checkpoint says of its text side, whatever its format."""

    backend: Tokenizer
    named_tokens: dict[str, Any]  # bos_token, eos_token, ... as chat templates see them
    eos_token_ids: tuple[int, ...]
    templates: dict[str, str]  # "default" and others by name


def parts_from_gguf(path: str | Path) -> TokenizerParts:
    """Reads the header of a GGUF file; raises CheckpointError when its tokenizer cannot be rebuilt exactly."""
    # Imported here, for they bring JAX along, which those who only want text do without.
    from jaxserve.weights.gguf_header import read_header
    from jaxserve.weights.mapped import MappedFile

    metadata = read_header(MappedFile(str(path))).metadata
    if f"{PREFIX}tokens" not in metadata:
        raise CheckpointError(
            "no tokenizer in this GGUF file; name another one with `tokenizer=`", file=str(path),
            expected=f"{PREFIX}tokens", found="none",
        )  # fmt: skip
    kind = metadata.get(f"{PREFIX}model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise CheckpointError(
            "this kind of tokenizer is not supported; name a folder with its tokenizer.json as `tokenizer=`",
            file=str(path), expected=f"{PREFIX}model gpt2 or llama", found=repr(kind),
        )  # fmt: skip
    tokens, types = metadata[f"{PREFIX}tokens"], metadata.get(f"{PREFIX}token_type")
    types = types or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            "a vocabulary without a type per token",
            file=str(path),
            expected=str(len(tokens)),
            found=str(len(types)),
        )
    backend = builders[kind](metadata, tokens, types, str(path))
    _add_special_tokens(backend, metadata, tokens, types, kind)
    named = {
        f"{name}_token": tokens[metadata[key]]
        for source, name in NAMED.items()
        if metadata.get(key := f"{PREFIX}{source}_token_id", len(tokens)) < len(tokens)
    }
    return TokenizerParts(backend, named, _endings(metadata, tokens, types), _templates(metadata))


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int], file: str) -> Tokenizer:
    kind = metadata.get(f"{PREFIX}pre", "default")
    if kind not in EXPRESSIONS:
        raise CheckpointError(
            "this kind of pre-tokenization is not known; name a folder with its tokenizer.json as `tokenizer=`",
            file=file, expected=f"{PREFIX}pre one of {', '.join(sorted(EXPRESSIONS))}", found=repr(kind),
        )  # fmt: skip
    if f"{PREFIX}merges" not in metadata:
        raise CheckpointError(
            "a BPE vocabulary without merges", file=file, expected=f"{PREFIX}merges", found="none"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    # A merge is "left right", and either may begin with a space in old files: cut at a later one.
    cuts = [(merge, merge.find(" ", 1)) for merge in metadata[f"{PREFIX}merges"]]
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts if cut > 0]
    try:
        model = models.BPE(vocab, merges, ignore_merges=kind in WHOLE_WORDS)
    except Exception as why:  # the library raises bare Exception
        raise CheckpointError("vocabulary and merges do not fit together", file=file, found=str(why)) from why
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int], file: str) -> Tokenizer:
    scores = metadata.get(f"{PREFIX}scores")
    if scores is None or len(scores) < len(tokens):
        raise CheckpointError(
            "a SentencePiece vocabulary without a score per token", file=file,
            expected=f"{len(tokens)} scores", found=str(len(scores or ())),
        )  # fmt: skip
    vocab = {token: index for index, token in enumerate(tokens)}
    mergeable = [kind in (NORMAL, UNUSED) for kind in types]
    unknown = metadata.get(f"{PREFIX}unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else None)
    model = models.BPE(
        vocab, merges_by_score(vocab, scores, mergeable), fuse_unk=True, byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    )  # fmt: skip
    backend = Tokenizer(model)
    escape, unescape = normalizers.Replace(" ", "\u2581"), decoders.Replace("\u2581", " ")
    if metadata.get(f"{PREFIX}add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), escape])
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        backend.normalizer, strip = escape, []
    backend.decoder = decoders.Sequence([unescape, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def merges_by_score(
    vocab: dict[str, int], scores: list[float], mergeable: list[bool]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE would do, best first: it stores only each token's score.

    SentencePiece merges the adjacent pair whose union is the token of the highest score, so every cut of a
    token into two tokens is a merge, ranked by that score. Control, byte and user-defined tokens never merge.
    """
    pieces = {token: index for token, index in vocab.items() if mergeable[index]}
    merges: list[tuple[str, str]] = []
    for token in sorted(pieces, key=lambda token: -scores[pieces[token]]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        merges += sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def _add_special_tokens(
    backend: Tokenizer, metadata: dict[str, Any], tokens: list[str], types: list[int], model: str
) -> None:
    """Marks tokens that are matched before all else, and says which ones every text begins and ends with."""
    named = {metadata.get(f"{PREFIX}{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    added = [
        # Some files call a turn's end user-defined: what ends an answer is special all the same.
        AddedToken(
            token, special=kind != USER_DEFINED or index in named or token in ENDINGS, normalized=False
        )
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
    backend.add_tokens(added)
    wanted = {
        "bos": metadata.get(
            f"{PREFIX}add_bos_token", model == "llama" or metadata.get(f"{PREFIX}pre") in ADDS_BOS
        ),
        "eos": metadata.get(f"{PREFIX}add_eos_token", False),
    }
    ids = {name: metadata.get(f"{PREFIX}{name}_token_id") for name in wanted}
    around = {name: tokens[index] for name, index in ids.items() if wanted[name] and index is not None}
    add_around(backend, around.get("bos"), around.get("eos"))


def add_around(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encoding with special tokens put `bos` before and `eos` after the text."""
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    if ids:
        single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(ids.items())
        )


def _endings(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = [metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    found = {
        token: index
        for index, token in enumerate(tokens)
        if token in ENDINGS and types[index] in (CONTROL, USER_DEFINED)
    }
    if {"<|return|>", "<|call|>"} <= found.keys():
        found.pop("<|end|>", None)  # in the harmony format it only ends one message of an answer
    ids = [index for index in [*named, *found.values()] if index is not None and index < len(tokens)]
    return tuple(dict.fromkeys(ids))


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    templates = {
        match[1]: value
        for key, value in metadata.items()
        if (match := re.fullmatch(r"tokenizer\.chat_template\.(.+)", key)) and isinstance(value, str)
    }
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return templates
