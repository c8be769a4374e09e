"""The arithmetic behind choices of form and size: experts hit by a batch, latent attention absorbed or expanded."""

import math
from collections.abc import Sequence

from pallas_kernels import chip as chips
from pallas_kernels.chip import Chip
from pallas_kernels.op import platform


def hot_experts(tokens: float, experts: int, top: int, loads: Sequence[float] | None = None) -> float:
    """How many experts a step of `tokens` reads, on average: the weight bytes of a mixture are this times one expert's.

    E(1 - (1 - k/E)^B) where each token chooses its `top` at random. Real routing prefers some and hits fewer:
    `loads`, the rows that each expert got so far, tells how often it is chosen.
    """
    if loads is None:
        return experts * (1 - (1 - top / experts) ** tokens)
    total = sum(loads)
    return sum(1 - (1 - min(1.0, top * load / total)) ** tokens for load in loads)


def expanded_is_cheaper(
    *,
    rank: int,
    rope: int,
    made: int,
    heads: int,
    tokens: int,
    seqs: int,
    context: int,
    chip: Chip | None,
    itemsize: int = 2,
) -> bool:
    """Whether `tokens` new tokens of `seqs` sequences attend cheaper to keys and values made from the latents.

    `made` is what a head makes of a latent of `rank`: channels of a key without rope, and of a value. Absorbed, every
    pair of token and key costs 2 N (2 rank + rope) operations. Expanded, 2 N (made + rope), and every key once
    2 N rank made more: that pays from some 170 tokens a sequence on with the sizes of DeepSeek. But having no kernel
    of its own, it sends its scores through memory, which a chip's absorbed kernel keeps on chip.
    `chip` None counts operations only.
    """
    pairs, keys = tokens * context * 2 * heads, seqs * context * 2 * heads
    absorbed = pairs * (2 * rank + rope) + 2 * heads * tokens * rank * made
    expanded = pairs * (made + rope) + keys * rank * made
    if chip is None:
        return expanded < absorbed
    read = seqs * context * (rank + rope) * itemsize
    scores = SCORE_PASSES * 4 * tokens * context * heads
    return chip.floor(float(expanded), float(read + scores)) < chip.floor(float(absorbed), float(read))


def microbatch_rows(tokens: int, seqs: int, hit: float = 1.0) -> int:
    """Rows of the microbatches in which a step of `tokens` rows of `seqs` sequences passes pipeline stages.

    M of them in N stages take M + N - 1 turns, each as long as a stage reads its weights, or multiplies T / M rows with
    them: the least where the two are equal. `hit` is how many rows an expert gets for each of a device's, on average.
    A step of fewer rows is one microbatch.
    """
    fewest = 1 if tokens == seqs else seqs + 1  # as many rows as sequences promise one row each
    least = max(math.ceil(_balance() / min(hit, 1.0)), fewest)
    count = max(1, tokens // least)
    if count == 1:
        return tokens
    return min(tokens, -(-tokens // (8 * count)) * 8)


def _balance() -> float:
    """Rows that a weight in 16 bits is multiplied with in the time in which it is read."""
    if platform() == "cpu":
        return ROWS_ON_CPU
    here = chips.ambient() if platform() == "tpu" else chips.ambient_gpu()
    return here.bf16 / here.hbm_bandwidth


ROWS_ON_CPU = 8
SCORE_PASSES = 4  # scores written and read, their exponentials written and read
