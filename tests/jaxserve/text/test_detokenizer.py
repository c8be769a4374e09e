"""Incremental decoding: whole characters only, each once, and together what decoding at once gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text import Detokenizer, Tokenizer, load_tokenizer
from tests.tiny_text import byte_level_backend, smollm2, write_spm_gguf


@pytest.fixture(
    scope="module", params=["byte-level", "sentencepiece", "sentencepiece without a space prefix"]
)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "byte-level":
        return Tokenizer(byte_level_backend())
    prefix = request.param == "sentencepiece"
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    return load_tokenizer(str(write_spm_gguf(path, ggml__add_space_prefix=prefix)))


def pieces(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int], skip: bool
) -> list[str]:
    """What a detokenizer gives for `ids`, pushed in chunks of `sizes`."""
    stream, at, given_out = Detokenizer(tokenizer, prompt, skip_special_tokens=skip), 0, []
    for size in [*sizes, len(ids)]:
        given_out.append(stream.push(ids[at : at + size]))
        at += size
    return [*given_out, stream.flush()]


IDS = st.lists(st.integers(0, 430), max_size=30)  # some beyond the vocabularies
SIZES = st.lists(st.integers(0, 5), max_size=20)


@given(data=st.data(), ids=IDS, sizes=SIZES, skip=st.booleans())
def test_pieces_joined_are_the_text_decoded_at_once(tokenizer, data, ids, sizes, skip):
    joined = "".join(pieces(tokenizer, [], ids, sizes, skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@given(prompt=IDS, ids=IDS, sizes=SIZES, skip=st.booleans())
def test_after_a_prompt_the_pieces_are_what_the_tokens_add(tokenizer, prompt, ids, sizes, skip):
    joined = "".join(pieces(tokenizer, prompt, ids, sizes, skip))
    before = tokenizer.decode(prompt, skip).rstrip("\ufffd")
    after = tokenizer.decode(prompt + ids, skip)
    assert after.startswith(before)
    assert after.endswith(joined)
    # All that is left out is what stands for the prompt's own broken bytes.
    assert set(after[len(before) : len(after) - len(joined)]) <= {"\ufffd"}


@given(text=st.text(max_size=30), sizes=SIZES)
def test_no_piece_of_valid_text_holds_half_a_character(tokenizer, text, sizes):
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    shown = pieces(tokenizer, [], ids, sizes, True)
    assert "\ufffd" not in "".join(shown).replace("\ufffd" if "\ufffd" in text else "", "")
    assert "".join(shown) == tokenizer.decode(ids)


@given(text=st.text(max_size=30))
def test_decoding_is_what_the_tokenizers_package_does(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_a_character_begun_by_the_prompt_is_given_whole(tokenizer):
    ids = tokenizer.encode("🙃", add_special_tokens=False)
    assert len(ids) > 1
    stream = Detokenizer(tokenizer, ids[:-1])
    assert stream.push(ids[-1:]).strip() == "🙃"


def test_an_unfinished_character_of_the_prompt_does_not_leak(tokenizer):
    start = tokenizer.encode("x🙃", add_special_tokens=False)[:-1]
    letter = tokenizer.encode("fox", add_special_tokens=False)
    stream = Detokenizer(tokenizer, start)
    assert (stream.push(letter) + stream.flush()).strip() == "fox"
    assert Detokenizer(tokenizer, start).flush() == ""


def test_a_word_after_a_prompt_keeps_its_space(tmp_path):
    tokenizer = load_tokenizer(str(write_spm_gguf(tmp_path / "spm.gguf")))
    the, fox = tokenizer.encode("the fox", add_special_tokens=False)
    assert Detokenizer(tokenizer, []).push([the, fox]) == "the fox"
    assert Detokenizer(tokenizer, [tokenizer.bos_token_id or 0]).push([the, fox]) == "the fox"
    assert Detokenizer(tokenizer, [the]).push([fox]) == " fox"


def test_special_tokens_are_shown_only_when_asked_for():
    tokenizer = Tokenizer(byte_level_backend())
    ids = tokenizer.encode("a<|im_end|>b")
    assert Detokenizer(tokenizer, []).push(ids) == "ab"
    for between in (True, False):
        stream = Detokenizer(tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=between)
        assert stream.push(ids) == "a<|im_end|>b"


@given(ids=st.lists(st.integers(0, 49151), max_size=20), sizes=SIZES)
def test_it_holds_for_a_real_vocabulary(real, ids, sizes):
    joined = "".join(pieces(real, [], ids, sizes, False))
    assert joined == real.decode(ids, False) == real.backend.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return load_tokenizer(str(smollm2()))
