"""Prefill and decode workers behind the router: long prompts that would disturb others are computed elsewhere."""

import threading

import pytest

from jaxserve.pace import Pace
from tests.server.conftest import chat
from tests.server.fake_engine import FakeEngine
from tests.server.routing import routed, until

CHAT = "/v1/chat/completions"
PACE = Pace(0.02, 0.001, 0.0)


def engine(role: str, **fields) -> FakeEngine:
    """Of a worker with this role, whose steps were measured."""
    made = FakeEngine(**fields)
    made.role = role  # type: ignore[attr-defined]
    for prompt_tokens in (0, 64, 512) * 4:
        made.step_times.observe(prompt_tokens, 1, PACE.seconds(prompt_tokens, 1))
    return made


@pytest.mark.supports(
    "routing", "a prompt is computed elsewhere when it is long, would disturb, and the link is fast"
)
def test_a_long_prompt_goes_to_a_prefill_worker_only_while_somebody_is_being_answered():
    prefill, decode = engine("prefill"), engine("decode", delay=0.02)
    with routed(prefill, decode, tpot_target=0.05) as (router, (first, second)):
        asks = [chat("Hi"), chat("x" * 150)]
        for body in asks:
            until(lambda: not router.worker(second.url).requests)  # nobody else is being answered
            router.client.post(CHAT, json=body | {"max_tokens": 2})
        running = threading.Thread(
            target=router.client.post,
            args=(CHAT,),
            kwargs={"json": chat(max_tokens=150, stream=True, ignore_eos=True)},
        )
        until(lambda: not router.worker(second.url).requests)
        running.start()
        until(lambda: any(ticket.answering for ticket in router.worker(second.url).tickets))
        for body in asks:
            router.client.post(CHAT, json=body | {"max_tokens": 2})
        running.join()
        assert [request.prefill_url for request in decode.seen] == [None, None, None, None, first.url]
        assert not prefill.seen
        assert router.counted("split_decisions_total", reason="split") == 1
        assert router.counted("split_decisions_total", reason="short_prompt") == 1
        assert router.counted("split_decisions_total", reason="nobody_waits") == 3


def test_a_prefill_worker_answers_when_nobody_else_can():
    with routed(engine("prefill"), engine("decode")) as (router, (first, second)):
        second.engine.state = "stalled"
        until(lambda: router.worker(second.url).state == "stalled")
        answer = router.client.post(CHAT, json=chat(max_tokens=2))
        assert answer.status_code == 200 and answer.headers["x-jaxserve-worker"] == first.url
