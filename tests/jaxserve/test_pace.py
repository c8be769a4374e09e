"""What steps cost is found from the steps that ran, whatever their mix."""

import random

import pytest

from jaxserve.pace import Pace, StepTimes

TRUE = Pace(0.02, 0.0001, 0.001)


def measured(steps: list[tuple[int, int]], true: Pace = TRUE) -> StepTimes:
    times = StepTimes()
    for prompt_tokens, sequences in steps:
        times.observe(prompt_tokens, sequences, true.seconds(prompt_tokens, sequences))
    return times


def test_nothing_is_claimed_before_enough_steps_ran():
    assert measured([(10, 1)] * 7).pace() is None


def test_a_mix_of_steps_gives_all_three_costs():
    rng = random.Random(0)
    found = measured([(rng.choice((0, 0, 64, 512)), rng.randint(0, 30)) for _ in range(300)]).pace()
    assert found == pytest.approx(TRUE, rel=1e-3)


@pytest.mark.parametrize("steps", [[(0, 4)] * 20, [(64, 0)] * 20, [(64, 3)] * 20])
def test_steps_of_one_kind_are_still_predicted(steps):
    found = measured(steps).pace()
    assert found.seconds(*steps[0]) == pytest.approx(TRUE.seconds(*steps[0]), rel=1e-3)
    assert min(found) >= 0


def test_costs_are_never_negative_and_the_latest_count():
    times = measured([(512, 0), (0, 8)] * 500)
    slow = Pace(0.2, 0.001, 0.0)
    for _ in range(1500):
        for prompt_tokens, sequences in ((512, 0), (0, 8)):
            times.observe(prompt_tokens, sequences, slow.seconds(prompt_tokens, sequences))
    found = times.pace()
    assert min(found) >= 0
    assert found.seconds(512, 0) == pytest.approx(slow.seconds(512, 0), rel=0.01)
