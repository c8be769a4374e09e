"""The shapes that steps are compiled for: few enough that all of them are compiled soon after the start."""

from dataclasses import dataclass

from jaxserve.config import EngineConfig

PROMPT_RATIO = 3  # between neighbouring sizes of steps that compute prompts


@dataclass(frozen=True, order=True)
class Bucket:
    """A step's padded size: T new tokens of B sequences with up to P cache pages each.

    T == B is a step in which no sequence has more than one new token.
    """

    tokens: int
    seqs: int
    pages: int
    spread: int = 1  # devices that compute one prompt together, each so many of its tokens


def every_bucket(config: EngineConfig, longest: int, context: int) -> list[Bucket]:
    """Those of a deployment with sequences of at most `longest` tokens, `context` devices sharing a long prompt."""
    budget, page_size = config.max_num_batched_tokens, config.block_size
    found = all_buckets(config.max_num_seqs, budget, longest, page_size)
    return found if context == 1 else [*found, spread_bucket(budget, longest, page_size, context)]


def all_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int
) -> list[Bucket]:
    """Those in which each device computes its own sequences, smallest first.

    Decoding comes in powers of two. Prompts come in a few sizes, alone (attention then needs no loop over
    sequences) and beside running sequences. Attention reads the keys that there are, so the number of pages is
    the same in all.
    """
    pages = -(-max_model_len // page_size)
    powers = [2**i for i in range(max_num_seqs.bit_length()) if 2**i < max_num_seqs] + [max_num_seqs]
    found = {Bucket(seqs, seqs, pages) for seqs in powers}
    # Never as small as the number of sequences: equal sizes promise one token each.
    size = max(max_num_batched_tokens, max_num_seqs + 1)
    while True:
        found |= {Bucket(size, max_num_seqs, pages), Bucket(size, 1, pages)}
        smaller = -(-size // (PROMPT_RATIO * 8)) * 8
        if not max_num_seqs < smaller < size:
            return sorted(found)
        size = smaller


def spread_bucket(max_num_batched_tokens: int, max_model_len: int, page_size: int, devices: int) -> Bucket:
    """The step for prompts longer than `max_num_batched_tokens`, by so many devices together."""
    unit = 256 if max_num_batched_tokens >= 256 else 8  # two stripes of a multiple of a lane's width
    return Bucket(-(-max_num_batched_tokens // unit) * unit, 1, -(-max_model_len // page_size), devices)


def first_needed(buckets: list[Bucket]) -> list[Bucket]:
    """A few of `buckets` between which any batch finds one that is not far too large."""
    spread, buckets = [b for b in buckets if b.spread > 1], [b for b in buckets if b.spread == 1]
    most = max(b.seqs for b in buckets)
    decoding = [b for b in buckets if b.tokens == b.seqs and b.seqs in (1, most)]
    return [*spread, *decoding, *(max(b for b in buckets if b.seqs == n and b.tokens > n) for n in {1, most})]


def choose(buckets: list[Bucket], counts: list[list[int]], pages: int) -> Bucket:
    """The smallest of `buckets` (sorted) for sequences with so many cache pages.

    `counts` has the numbers of new tokens of the sequences of each group of devices; all groups run the same bucket.
    """
    tokens, seqs = max(map(sum, counts)), max(map(len, counts))
    single = all(max(group) == 1 for group in counts)
    for b in buckets:
        if b.spread > 1:
            continue
        if b.tokens >= tokens and b.seqs >= seqs and b.pages >= pages and (single or b.tokens != b.seqs):
            return b
    raise AssertionError(f"no bucket for {seqs} sequences, {tokens} tokens, {pages} pages")
