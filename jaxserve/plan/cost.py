"""The arithmetic behind choices of form and size: experts hit by a batch, latent attention absorbed or expanded."""

from collections.abc import Sequence

from pallas_kernels.chip import Chip


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


SCORE_PASSES = 4  # scores written and read, their exponentials written and read
