"""Tokenizers as Hugging Face files: every file that counts is heeded, and what is broken is named."""

import json
import subprocess
import sys
import threading

import pytest
from tokenizers import processors

from jaxserve.errors import CheckpointError
from jaxserve.text import load_tokenizer
from tests.tiny_text import CHATML, CORPUS, SPECIAL, byte_level_backend, write_bpe_gguf, write_folder


def test_special_tokens_may_be_text_or_objects_and_come_from_either_file(tmp_path):
    folder = write_folder(tmp_path / "a", bos_token=None, pad_token={"content": "<|endoftext|>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.named_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert tokenizer.bos_token_id == tokenizer.backend.token_to_id("<|im_start|>")


def test_eos_may_be_a_list_and_the_tokenizers_own_counts_too(tmp_path):
    folder = write_folder(tmp_path / "a")
    own = load_tokenizer(str(folder)).eos_token_ids
    assert len(own) == 1
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(str(folder)).eos_token_ids == (7, *own)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_tokenizer(str(folder)).eos_token_ids == (5, 6, *own)


def test_templates_and_which_of_them_goes_first(tmp_path):
    folder = write_folder(tmp_path / "a", chat_template="in config")
    assert load_tokenizer(str(folder)).chat_template.templates == {"default": "in config"}
    named = [{"name": "default", "template": "in config"}, {"name": "rag", "template": "documents"}]
    folder = write_folder(tmp_path / "b", chat_template=named)
    (folder / "chat_template.jinja").write_text("own file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    expected = {"default": "own file", "rag": "documents", "tool_use": "tools"}
    assert load_tokenizer(str(folder)).chat_template.templates == expected


def test_added_tokens_that_only_the_config_knows(tmp_path):
    size = byte_level_backend().get_vocab_size()
    added = {str(size): {"content": "<extra>", "special": True, "lstrip": False}}
    tokenizer = load_tokenizer(str(write_folder(tmp_path / "a", added_tokens_decoder=added)))
    assert tokenizer.encode("a<extra>b")[1] == size
    assert tokenizer.is_special(size) and tokenizer.vocab_size == size + 1
    folder = write_folder(
        tmp_path / "b", added_tokens_decoder={"9999": {"content": "<far>", "special": True}}
    )
    with pytest.raises(CheckpointError, match=r"'<far>' cannot get its number.*expected 9999"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("kind", "begins"), [("LlamaTokenizerFast", True), ("PreTrainedTokenizerFast", False)]
)
def test_llama_like_classes_heed_add_bos_token(tmp_path, kind, begins):
    folder = write_folder(tmp_path / "a", tokenizer_class=kind, add_bos_token=True)
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) == begins


def test_llama_like_classes_can_turn_bos_off(tmp_path):
    backend = byte_level_backend()
    bos = SPECIAL[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    for add, begins in ((None, True), (True, True), (False, False)):
        folder = write_folder(
            tmp_path / str(add), backend=backend, tokenizer_class="LlamaTokenizer", add_bos_token=add
        )
        tokenizer = load_tokenizer(str(folder))
        assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) == begins


@pytest.mark.supports("text", "tokenizer.json and its config files")
def test_saving_and_loading_gives_the_same_tokenizer(tmp_path):
    from_gguf = load_tokenizer(str(write_bpe_gguf(tmp_path / "a.gguf", ggml__add_bos_token=True)))
    (tmp_path / "saved").mkdir()
    from_gguf.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    for text in [*CORPUS, "<|im_end|><tool_response>"]:
        assert again.encode(text) == from_gguf.encode(text)
        assert again.encode(text, allow_special=False) == from_gguf.encode(text, allow_special=False)
    assert again.eos_token_ids == from_gguf.eos_token_ids
    assert again.named_tokens == from_gguf.named_tokens
    assert again.chat_template.templates == {"default": CHATML}


def test_a_file_in_the_folder_or_a_gguf_beside_it_will_do(tmp_path):
    folder = write_folder(tmp_path / "a")
    (folder / "model.safetensors").touch()
    assert (
        load_tokenizer(str(folder / "model.safetensors")).vocab_size == load_tokenizer(str(folder)).vocab_size
    )
    (tmp_path / "b").mkdir()
    write_bpe_gguf(tmp_path / "b" / "model.gguf")
    assert load_tokenizer(str(tmp_path / "b")).chat_template is not None


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged or newer"),
        ("tokenizer_config.json", "{", "not JSON; fetch it again.*tokenizer_config.json"),
        ("generation_config.json", "[1]", "expected an object; found list"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, problem):
    folder = write_folder(tmp_path / "a")
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(str(folder))


def test_a_decoder_that_is_not_understood_is_refused(tmp_path):
    backend = byte_level_backend()
    backend.decoder = None
    with pytest.raises(CheckpointError, match=r"decodes in a way that is not supported.*found none"):
        load_tokenizer(str(write_folder(tmp_path / "a", backend=backend)))


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"name another place.*save_pretrained.*found tokenizer.model"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "nowhere" / "model"))


def test_text_needs_no_jax():
    program = "import sys, jaxserve.text; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_other_threads_run_while_a_long_text_is_tokenised_and_its_tokens_are_the_same(tmp_path):
    tokenizer = load_tokenizer(str(write_folder(tmp_path / "a")))
    text = " ".join(CORPUS) * (2_000_000 // len(" ".join(CORPUS)))
    ended, turns = threading.Event(), []

    def other() -> None:
        while not ended.wait(0.001):
            turns.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    before = len(turns)
    tokens = tokenizer.encode(text)
    between = len(turns) - before
    ended.set()
    thread.join()
    assert between > 5  # were the interpreter held all the time: one turn before and one after
    assert tokens == tokenizer.backend.encode(text).ids
