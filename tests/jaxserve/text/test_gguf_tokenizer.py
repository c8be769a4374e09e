"""Tokenizers inside GGUF files: rebuilt exactly, or refused by name."""

import heapq
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import CheckpointError
from jaxserve.text import Tokenizer, load_tokenizer
from tests.tiny_text import (
    CHATML,
    CORPUS,
    MARKERS,
    SPECIAL,
    SPM_WORDS,
    byte_level_backend,
    smollm2,
    spm_vocabulary,
    write_bpe_gguf,
    write_gguf,
    write_spm_gguf,
)


def sentence_piece(text: str) -> list[int]:
    """SentencePiece's BPE as its paper has it: merge the best-scored adjacent pair until none is left."""
    tokens, scores, types = spm_vocabulary()
    vocab = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    symbols = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [
            (-scores[vocab[left + right]], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in vocab
        ]
        if not pairs:
            break
        _, at = heapq.nsmallest(1, pairs)[0]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        known = vocab.get(symbol)
        ids += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()] if known is None else [known]
    return ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(str(write_spm_gguf(tmp_path_factory.mktemp("spm") / "spm.gguf")))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(str(write_bpe_gguf(tmp_path_factory.mktemp("bpe") / "bpe.gguf")))


@given(
    st.lists(st.sampled_from([*SPM_WORDS, "qu", "ow", "z", "é", "東", "🙂", " ", "  "]), max_size=12).map(
        "".join
    )
)
def test_merging_by_score_is_what_sentencepiece_does(spm, text):
    assert spm.encode(text, add_special_tokens=False) == sentence_piece(text)


def test_sentencepiece_details(spm, tmp_path):
    assert spm.encode("the") == [1, *spm.encode("the", add_special_tokens=False)]
    assert spm.decode(spm.encode("the  fox 🙂\n")) == "the  fox 🙂\n"
    assert (spm.bos_token_id, spm.eos_token_ids) == (1, (2,))
    marker = spm.encode("a<marker>b", add_special_tokens=False)
    assert 3 in marker and not spm.is_special(3)
    assert spm.token_bytes(spm.encode("🙂", add_special_tokens=False)[-1]) == "🙂".encode()[-1:]
    plain = load_tokenizer(
        str(write_spm_gguf(tmp_path / "a.gguf", ggml__add_space_prefix=False, ggml__add_bos_token=False))
    )
    assert [plain.id_to_token(i) for i in plain.encode("the")] == ["the"]
    assert plain.decode(plain.encode(" the")) == " the"


def test_byte_level_is_what_the_tokenizers_package_makes_of_the_same_vocabulary(bpe):
    backend = byte_level_backend()
    for text in [*CORPUS, "".join(SPECIAL + MARKERS), "x <|im_end|> y"]:
        ids = bpe.encode(text)
        assert [bpe.id_to_token(i) for i in ids] == backend.encode(text).tokens
        assert bpe.decode(ids, skip_special_tokens=False) == text


def test_byte_level_details(bpe, tmp_path):
    assert bpe.chat_template is not None and bpe.chat_template.templates == {"default": CHATML}
    assert bpe.named_tokens["eos_token"] == "<|im_end|>"
    ids = {token: bpe.backend.token_to_id(token) for token in SPECIAL}
    assert bpe.eos_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])  # the named one first
    with_bos = load_tokenizer(
        str(write_bpe_gguf(tmp_path / "a.gguf", ggml__add_bos_token=True, ggml__add_eos_token=True))
    )
    assert with_bos.encode("x")[0] == with_bos.bos_token_id
    assert with_bos.encode("x")[-1] == with_bos.eos_token_ids[0]
    assert bpe.token_bytes(bpe.vocab_size) == b""
    assert bpe.decode([10**6, -1]) == ""


def test_a_turn_end_that_the_file_calls_user_defined_is_special_all_the_same(tmp_path):
    size = load_tokenizer(str(write_bpe_gguf(tmp_path / "a.gguf"))).vocab_size
    types = [1] * (size - 5) + [4] * 5
    again = load_tokenizer(str(write_bpe_gguf(tmp_path / "b.gguf", ggml__token_type=types)))
    assert again.is_special(again.eos_token_ids[0])


@pytest.mark.supports("text", "tokenizer and chat template from GGUF")
def test_a_real_vocabulary():
    tokenizer = load_tokenizer(str(smollm2()))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids[0] == 2
    for text in [*CORPUS, "\ttab\r\n\r\n  indented", "".join(map(chr, range(0x20, 0x250)))]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    for token in ("<|im_start|>", "<|im_end|>", "<repo_name>"):
        ids = tokenizer.encode(token, allow_special=False)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == token


def test_threads_may_share_a_tokenizer(bpe):
    def work(n: int) -> bool:
        text = f"{CORPUS[n % 3]} {n} <|im_end|>"
        plain, special = bpe.encode(text, allow_special=False), bpe.encode(text)
        return bpe.decode(plain) == text and bpe.decode(special, False) == text and plain != special

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


@pytest.mark.parametrize(
    ("write", "keys", "problem"),
    [
        (write_gguf, {"chat_template": "x"}, "no tokenizer in this GGUF file"),
        (write_bpe_gguf, {"ggml__model": "rwkv"}, "kind of tokenizer is not supported.*found 'rwkv'"),
        (
            write_bpe_gguf,
            {"ggml__pre": "new-kind"},
            "pre-tokenization is not known.*smollm.*found 'new-kind'",
        ),
        (write_bpe_gguf, {"ggml__merges": ["x yz"]}, "vocabulary and merges do not fit"),
        (write_spm_gguf, {"ggml__scores": [0.0]}, "without a score per token.*found 1"),
        (write_spm_gguf, {"ggml__token_type": [1, 1]}, "a type per token.*found 2"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(tmp_path, write, keys, problem):
    path = write(tmp_path / "a.gguf", **keys)
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(str(path))


def test_a_damaged_file_is_refused(tmp_path):
    whole = write_bpe_gguf(tmp_path / "a.gguf").read_bytes()
    for cut in (0, 3, 20, 500, len(whole) // 2):
        (tmp_path / "b.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            load_tokenizer(str(tmp_path / "b.gguf"))
