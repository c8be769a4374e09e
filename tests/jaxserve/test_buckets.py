"""Buckets: few, and always one for whatever the scheduler plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.buckets import all_buckets, choose, first_needed


@given(data=st.data(), seqs=st.integers(1, 70), page=st.sampled_from([1, 4, 16, 128]))
def test_every_batch_that_settings_allow_finds_a_step(data, seqs, page):
    budget = data.draw(st.integers(seqs, 2000))
    longest = data.draw(st.integers(1, 5000))
    buckets = all_buckets(seqs, budget, longest, page)
    assert buckets == sorted(set(buckets)) and len(buckets) <= 20
    counts = data.draw(st.lists(st.integers(1, budget), min_size=1, max_size=seqs))
    counts = [min(count, budget // len(counts)) for count in counts]
    pages = data.draw(st.integers(1, -(-longest // page)))
    for some in (buckets, sorted(first_needed(buckets))):
        found = choose(some, [counts], pages)
        assert found.tokens >= sum(counts) and found.seqs >= len(counts) and found.pages >= pages
        if max(counts) > 1:
            assert found.tokens > found.seqs, "equal sizes promise one token a sequence"


def test_the_full_batch_finds_a_step_whatever_the_settings():
    for seqs in range(1, 34):
        for budget in (seqs, seqs + 1, 8 * seqs, 512):
            buckets = all_buckets(seqs, max(budget, seqs), 4096, 16)
            assert choose(buckets, [[1] * seqs], 256).tokens >= seqs
            assert choose(buckets, [[max(budget, seqs)]], 256).seqs >= 1


def test_few_sequences_get_smaller_steps():
    buckets = all_buckets(32, 512, 8192, 16)
    assert len(buckets) <= 12, "each costs a compile at every start"
    assert choose(buckets, [[1]], 3).tokens == 1
    assert choose(buckets, [[1] * 3], 3).seqs == 4
    assert choose(buckets, [[20]], 3).tokens <= 64 and choose(buckets, [[20]], 3).seqs == 1


def test_no_bucket_is_a_mistake_of_ours_and_says_for_what():
    with pytest.raises(AssertionError, match="2 sequences, 9 tokens, 1 pages"):
        choose(all_buckets(4, 8, 64, 16), [[4, 5]], 1)
