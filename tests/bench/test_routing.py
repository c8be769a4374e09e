"""Routing by cost before four workers: sooner first tokens than round robin, and work that is shared evenly."""

import pytest

from bench.routing import compare, gain, run
from bench.traces import sessions


@pytest.mark.supports(
    "routing", "median time to first token at least halved against round robin, load within 1.3"
)
def test_first_tokens_come_twice_as_soon_as_with_round_robin_and_work_is_shared_evenly():
    rows = compare(sessions(0))
    assert (
        rows["cost"]["requests"] == rows["round-robin"]["requests"] == sum(len(s.turns) for s in sessions(0))
    )
    assert gain(rows) >= 2
    assert rows["cost"]["imbalance"] < 1.3
    assert rows["cost"]["hit_rate"] > rows["round-robin"]["hit_rate"]


def test_the_same_seed_gives_the_same_figures():
    talks = sessions(1, count=4)
    assert run("cost", talks, 2, 5) == run("cost", talks, 2, 5)
