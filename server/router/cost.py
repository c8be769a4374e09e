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
    work: float  # seconds that it keeps the device busy: its prompt, and its share of the steps of its answer


def predict(standing: Standing, prompt_tokens: int, hit: int, output_tokens: float) -> Prediction:
    """The time to the first and to the last token.

    The prompt waits for those before it and then for itself; each step on the way also serves the running answers.
    With every place taken, it waits first for answers to end: one does every (their length / places).
    """
    pace, decoding = standing.pace, min(standing.decoding, standing.max_num_seqs)
    own = max(prompt_tokens - hit, 1)
    to_compute = standing.backlog + own
    steps = math.ceil(to_compute / max(standing.step_tokens - decoding, 1))
    ttft = pace.prompt_token * to_compute + steps * pace.seconds(0, decoding)
    together = min(decoding + 1, standing.max_num_seqs)
    answer = output_tokens * pace.seconds(0, together)
    work = pace.prompt_token * own + answer / together
    too_many = standing.requests + 1 - standing.max_num_seqs
    if too_many > 0:
        ttft += too_many * answer / standing.max_num_seqs
    return Prediction(hit, ttft, ttft + answer, work)


def choose[W: Hashable](
    predictions: Mapping[W, Prediction],
    recent: Mapping[W, float],
    tolerance: float,
    before: W | None,
    rng: random.Random,
) -> W:
    """The worker for a request: where it ends soonest, or for a new conversation where the least work is.

    A conversation stays where it begins, as its pages do, so its first request is placed by work: on the worker that,
    with it, was given the fewest seconds of work lately. A beginning that is cached counts by the seconds that it
    saves, so it is computed anew elsewhere once its worker is ahead by more than that: what many ask for spreads.

    Later requests go where they end soonest; among workers that differ by less than predictions usually err, to the
    one that served the conversation before, else to the one with less recent work of two drawn at random. Two of
    many, because what is known of all of them is a little old: everybody's best would be overrun.

    Args:
        recent: seconds of work given to each lately.
        tolerance: seconds by which predictions err.
        before: who served the conversation before; None for a new one.
    """
    if before is None or before not in predictions:
        work = {worker: recent.get(worker, 0.0) + each.work for worker, each in predictions.items()}
        least = min(work.values())
        return rng.choice([worker for worker in work if work[worker] == least])
    soonest = min(prediction.seconds for prediction in predictions.values())
    near = [worker for worker, each in predictions.items() if each.seconds <= soonest + tolerance]
    if before in near:
        return before
    pair = rng.sample(near, min(2, len(near)))
    return min(pair, key=lambda worker: recent.get(worker, 0.0))
