"""Workers as processes that are killed, stopped and restarted: answers go on, or begin again, and pages come home."""

import json
import signal

import httpx
import pytest

from tests.server.workers import Worker, conserved
from tests.tiny import tiny_checkpoint

PROMPT = [(i * 37 + i // 7) % 250 for i in range(150)]
SIZES = {
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8,
    "num_gpu_blocks_override": 160, "served_model_name": "tiny", "kv_lease_seconds": 2.0, "kv_silence_timeout": 2.0,
    "split_min_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True))


@pytest.fixture(scope="module")
def start(compilation_cache_dir):
    workers: list[Worker] = []

    def start(model: str, **flags) -> Worker:
        workers.append(Worker(model, compilation_cache_dir, **SIZES | flags))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


@pytest.fixture(scope="module")
def workers(start, checkpoint):
    prefill = start(checkpoint, role="prefill")
    decode = start(checkpoint, role="decode", prefill_url=prefill.url)
    return prefill.ready(), decode.ready()


def ask(worker: Worker, prompt: list[int], **fields) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": 10,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | fields
    answer = httpx.post(worker.url + "/v1/completions", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def begin(worker: Worker, prompt: list[int], stop_after: int, **fields) -> list[int]:
    """The first tokens of a stream; then whoever listened is gone."""
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    got: list[int] = []
    with httpx.stream("POST", worker.url + "/v1/completions", json=body | fields, timeout=100) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                got += json.loads(line[6:])["choices"][0]["token_ids"]
            if len(got) >= stop_after:
                return got
    raise AssertionError("the stream ended")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"link": "x"}, "link 'x' is not offered here"),
        ({"skip": 1000}, "skip must be from 0 to the prompt's 150 tokens"),
        ({"skip": -1}, "skip must be from 0"),
        ({"request": {"prompt_token_ids": 5}}, "request or receiver"),
        ({"receiver": {"page_size": "q"}}, "request or receiver"),
        ({"request": {"params": {"logit_bias": {"x": 1}}}}, "request or receiver"),
    ],
)
def test_a_handover_that_cannot_be_is_refused(workers, change, words):
    prefill, decode = workers
    receiver = httpx.get(decode.url + "/internal/handshake").json()
    request = {"request_id": "a", "prompt_token_ids": PROMPT, "priority": 0, "cache_salt": None, "params": {}}
    body = {"request": request, "receiver": receiver, "skip": 0, "link": "tcp"}
    for name, value in change.items():
        body[name] = body[name] | value if isinstance(value, dict) else value
    answer = httpx.post(prefill.url + "/internal/prefill", json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.supports(
    "disaggregation", "prefill and decode in two processes (jax.experimental.transfer, HTTP)"
)
def test_two_processes_say_what_one_says(workers):
    prefill, decode = workers
    assert ask(decode, PROMPT) == ask(prefill, PROMPT)
    assert decode.metric("jaxserve:kv_transfer_tokens_total") == 144
    named = httpx.post(
        decode.url + "/v1/completions",
        json={"prompt": PROMPT[1:], "max_tokens": 3, "return_token_ids": True},
        headers={"X-Jaxserve-Prefill": "http://127.0.0.1:1"},
        timeout=100,
    )
    assert (
        named.status_code == 200
        and decode.metric("jaxserve:kv_transfer_failures_total", reason="unreachable") == 1
    )
    conserved(prefill)
    conserved(decode)


def test_a_worker_that_is_stopped_is_given_up_and_its_pages_are_not_waited_for(workers):
    prefill, decode = workers
    expected = ask(prefill, PROMPT[2:])
    prefill.signal(signal.SIGSTOP)
    try:
        assert ask(decode, PROMPT[2:]) == expected
    finally:
        prefill.signal(signal.SIGCONT)
    assert decode.metric("jaxserve:kv_transfer_failures_total", reason="silent") >= 1
    conserved(prefill)
    conserved(decode)


def test_a_client_that_leaves_frees_both_sides(workers):
    prefill, decode = workers
    for tokens in (1, 3):
        begin(decode, [tokens, *PROMPT], tokens, max_tokens=90)
    conserved(prefill)
    conserved(decode)


@pytest.mark.supports("disaggregation", "a request goes on elsewhere when its worker dies")
def test_a_request_goes_on_when_its_worker_is_killed_and_the_next_one_has_other_weights(
    workers, start, checkpoint, tmp_path
):
    prefill, decode = workers
    expected = ask(prefill, [9, *PROMPT], max_tokens=40, seed=3, temperature=0.8)
    got = begin(decode, [9, *PROMPT], 7, max_tokens=40, seed=3, temperature=0.8)
    decode.kill()
    rest = ask(prefill, [9, *PROMPT], max_tokens=40, seed=3, temperature=0.8, generated_token_ids=got)
    assert got + rest == expected
    conserved(prefill)

    other = start(
        str(tiny_checkpoint(tmp_path, tokenizer=True, seed=1)), role="decode", prefill_url=prefill.url
    ).ready()
    assert ask(other, PROMPT) != ask(prefill, PROMPT)
    assert other.metric("jaxserve:kv_transfer_failures_total", reason="incompatible") == 1
    prefill.kill()
    ask(other, PROMPT[3:])
    assert other.metric("jaxserve:kv_transfer_failures_total", reason="incompatible") == 2, (
        "known without asking"
    )
    conserved(other)
