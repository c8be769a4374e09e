"""Real models through two processes that share the work: the reference's tokens, with caches that have a beginning."""

import json
import shutil

import httpx
import pytest
from tokenizers import Tokenizer

from jaxserve.demo import demo_model
from jaxserve.errors import ConfigError
from tests.jaxserve.models.running import GOLDEN, golden_prompts
from tests.server.workers import Worker, conserved
from tests.tiny import tiny_tokenizer

PAGE = 8
SIZES = {
    "max_model_len": 192, "max_num_seqs": 1, "max_num_batched_tokens": 32, "block_size": PAGE,
    "num_gpu_blocks_override": 80, "dtype": "float32", "served_model_name": "model", "split_min_tokens": 16,
}  # fmt: skip


def smollm2(folder) -> tuple[str, list[int], list[int]]:
    """(the model, a prompt of several turns, the reference's continuation)."""
    try:
        path = demo_model()
    except ConfigError as why:
        pytest.skip(str(why))
    chats = json.loads((GOLDEN / "smollm2_135m_instruct" / "chat_greedy.json").read_text())["conversations"]
    chat = max(chats, key=lambda chat: len(chat["prompt_ids"]))
    return path, chat["prompt_ids"], chat["greedy_ids"]


def deepseek(folder) -> tuple[str, list[int], list[int]]:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "deepseek_v3" / name, folder)
    tiny_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens(
        [f"<{i}>" for i in range(tokenizer.get_vocab_size(), 512)]
    )  # as many as the golden has
    tokenizer.save(path)
    golden = max(golden_prompts("deepseek_v3"), key=lambda prompt: prompt["length"])
    return str(folder), golden["ids"], golden["greedy"]


def ask(worker: Worker, prompt: list[int], count: int) -> tuple[list[int], int]:
    """(greedy tokens, how many tokens of the prompt were cached on the way)."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(worker.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=100)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"][0]["token_ids"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.supports(
    "disaggregation", "SmolLM2 and DeepSeek over two processes, with prefix reuse on both sides"
)
@pytest.mark.parametrize("model", [smollm2, deepseek])
def test_two_processes_say_what_the_reference_says_with_prefix_reuse_on_both_sides(
    model, tmp_path, compilation_cache_dir
):
    path, prompt, golden = model(tmp_path)
    prefill = Worker(path, compilation_cache_dir, role="prefill", **SIZES)
    decode = Worker(path, compilation_cache_dir, role="decode", prefill_url=prefill.url, **SIZES)
    try:
        prefill.ready()
        decode.ready()
        half, whole = len(prompt) // 2 // PAGE * PAGE, len(prompt) // PAGE * PAGE
        ask(decode, prompt[: half + 1], 1)
        assert decode.metric("jaxserve:kv_transfer_tokens_total") == half

        assert ask(decode, prompt, len(golden)) == (golden, half)
        assert decode.metric("jaxserve:kv_transfer_tokens_total") == whole, "only what was missing travelled"
        assert prefill.metric("vllm:prefix_cache_hits_total") == half, "only that was computed"

        assert ask(decode, prompt, len(golden)) == (golden, (len(prompt) - 1) // PAGE * PAGE)
        assert decode.metric("jaxserve:kv_transfer_tokens_total") == whole, "all of it was there"
        assert ask(prefill, prompt, len(golden))[0] == golden, "a prefill worker alone says the same"
        for reason in ("transfer", "corrupt", "silent", "unreachable"):
            assert decode.metric("jaxserve:kv_transfer_failures_total", reason=reason) == 0
        conserved(prefill)
        conserved(decode)
    finally:
        decode.kill()
        prefill.kill()
