"""What giving a request to a worker costs, in seconds, and which worker to choose. No clock, no network.

The parts of the cost are all measured: how long steps take (`jaxserve.pace`, told by each worker), what is on its way
to the worker, how much of the prompt it has, how long answers usually are. There is nothing to tune.
"""

import math
import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from jaxserve.pace import Pace


@dataclass(frozen=True)
class Standing:
    """A worker as a newcomer finds it."""

    pace: Pace
    backlog: float  # prompt tokens that are computed before the newcomer's
    decoding: int  # requests whose answers are being made
    requests: int  # all that it was given and has not finished
    max_num_seqs: int
    step_tokens: int  # most new tokens of a step


@dataclass(frozen=True)
class Prediction:
    """What is expected of a request on a worker."""

    hit: int  # prompt tokens that need not be computed
    ttft: float  # seconds to the first token
    seconds: float  # to the last one


def predict(standing: Standing, prompt_tokens: int, hit: int, output_tokens: float) -> Prediction:
    """The time to the first and to the last token.

    The prompt waits for those before it and then for itself; each step on the way also serves the running answers.
    With every place taken, it waits first for answers to end: one does every (their length / places).
    """
    pace, decoding = standing.pace, min(standing.decoding, standing.max_num_seqs)
    to_compute = standing.backlog + max(prompt_tokens - hit, 1)
    steps = math.ceil(to_compute / max(standing.step_tokens - decoding, 1))
    ttft = pace.prompt_token * to_compute + steps * pace.seconds(0, decoding)
    answer = output_tokens * pace.seconds(0, min(decoding + 1, standing.max_num_seqs))
    too_many = standing.requests + 1 - standing.max_num_seqs
    if too_many > 0:
        ttft += too_many * answer / standing.max_num_seqs
    return Prediction(hit, ttft, ttft + answer)


def choose[W: Hashable](
    predictions: Mapping[W, Prediction],
    recent: Mapping[W, float],
    tolerance: float,
    favourite: W | None,
    rng: random.Random,
) -> W:
    """The worker with the least seconds; of those that differ by less than predictions usually err, the favourite
    (who served the session before), else the one with less recent work of two drawn at random.

    Two of many, because what is known of all of them is a little old: everybody's best would be overrun.

    Args:
        recent: seconds of work given to each lately.
        tolerance: seconds by which predictions err.
    """
    least = min(prediction.seconds for prediction in predictions.values())
    near = [worker for worker, prediction in predictions.items() if prediction.seconds <= least + tolerance]
    if favourite in near:
        assert favourite is not None
        return favourite
    pair = rng.sample(near, min(2, len(near)))
    return min(pair, key=lambda worker: recent.get(worker, 0.0))
