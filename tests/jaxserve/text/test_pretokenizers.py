"""How vocabularies cut text into words: nothing gets lost, and each kind cuts where it is documented to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from jaxserve.text.pretokenizers import EXPRESSIONS, pre_tokenizer

BYTES = decoders.ByteLevel()
KINDS = {kind: pre_tokenizer(kind) for kind in EXPRESSIONS}


def words(kind: str, text: str) -> list[str]:
    return [BYTES.decode([word]) for word, _ in KINDS[kind].pre_tokenize_str(text)]


@given(st.sampled_from(sorted(KINDS)), st.text(max_size=40))
def test_the_words_joined_are_the_text(kind, text):
    pieces = [word for word, _ in KINDS[kind].pre_tokenize_str(text)]
    assert BYTES.decode(["".join(pieces)]) == text


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("gpt-2", "it's 12345  ok\n\n!", ["it", "'s", " 12345", " ", " ok", "\n", "\n", "!"]),
        ("smollm", "in 2024  x", ["in", " ", "2", "0", "2", "4", " ", " x"]),
        ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "IT'S 12345!?\n x", ["IT", "'S", " ", "1", "2", "3", "4", "5", "!?\n", " x"]),
        ("qwen35", "नमस्ते a", ["नमस्ते", " a"]),
        ("qwen2", "नमस्ते a", ["नमस", "्त", "े", " a"]),
        ("gpt-4o", "camelCase's 1234/\n", ["camel", "Case's", " ", "123", "4", "/\n"]),
        ("tekken", "camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
        ("deepseek-v3", "12345東京tower a.b", ["123", "45", "東京", "tower", " a", ".b"]),
        ("deepseek-llm", "a 12\n東京!", ["a", " ", "12", "\n", "東京", "!"]),
        ("deepseek-coder", "a12 b", ["a", "1", "2", " b"]),
        ("kimi-k2", "東京Tower's 1234", ["東京", "Tower's", " ", "123", "4"]),
        ("falcon", "a--12345", ["a", "--", "123", "45"]),
        ("default", "a--12345", ["a", "--", "123", "45"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("seed-coder", "a!\n", ["a", "!", "\n"]),
        ("bailingmoe", "It'S\n\na", ["It", "'S", "\n\n", "a"]),
        ("tiny_aya", "1234567 a", ["1", "234", "567", " a"]),
    ],
)
def test_words_of(kind, text, expected):
    assert words(kind, text) == expected
