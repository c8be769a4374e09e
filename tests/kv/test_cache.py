"""The cache gives every page to one owner at a time, finds what it holds, and forgets old leaf first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kv import KVCache, Lease
from kv.hashing import extend_keys


def filled(cache: KVCache, tokens: list[int], salt: str = "") -> Lease:
    """A lease on `tokens`, all of them computed and committed."""
    lease = cache.match(tokens, salt)
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens)
    return lease


def test_page_zero_is_never_given_out():
    cache = KVCache(num_pages=5, page_size=2)
    lease = cache.match([1] * 8)
    assert cache.grow(lease, 8)
    assert sorted(lease.pages) == [1, 2, 3, 4]
    assert (cache.free, cache.used, cache.cached, cache.usage) == (0, 4, 0, 1.0)


def test_growing_is_all_or_nothing():
    cache = KVCache(num_pages=4, page_size=2)
    lease = cache.match([1, 2])
    assert cache.grow(lease, 2)
    before = list(lease.pages)
    assert not cache.grow(lease, 7)
    assert lease.pages == before and cache.free == 2


def test_a_match_leaves_at_least_one_token_to_compute():
    cache = KVCache(num_pages=9, page_size=4)
    tokens = list(range(8))
    cache.release(filled(cache, tokens))
    assert cache.match(tokens).length == 4
    assert cache.match([*tokens, 9]).length == 8
    assert cache.match(tokens[:4]).length == 0


def test_prefixes_are_shared_only_under_the_same_salt():
    cache = KVCache(num_pages=9, page_size=2)
    filled(cache, [1, 2, 3, 4], salt="a")
    assert cache.match([1, 2, 3, 4, 5], salt="a").length == 4
    assert cache.match([1, 2, 3, 4, 5], salt="b").length == 0
    assert cache.match([1, 2, 3, 4, 5]).length == 0


def test_a_page_is_found_only_behind_its_own_prefix():
    cache = KVCache(num_pages=9, page_size=2)
    filled(cache, [1, 2, 3, 4])
    assert cache.match([3, 4, 5]).length == 0
    assert cache.match([9, 9, 3, 4, 5]).length == 0
    assert cache.match([1, 2, 9, 9, 5]).length == 2


def test_skipping_the_cache_finds_nothing_but_still_fills_it():
    cache = KVCache(num_pages=9, page_size=2)
    cache.release(filled(cache, [1, 2, 3, 4]))
    lease = cache.match([1, 2, 3, 4, 5, 6], skip=True)
    assert lease.length == 0
    assert cache.grow(lease, 6)
    cache.commit(lease, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).length == 6
    assert (cache.prefix_queries, cache.prefix_hits) == (4, 0)


def test_without_prefix_caching_nothing_is_kept():
    cache = KVCache(num_pages=9, page_size=2, enable_prefix_caching=False)
    cache.release(filled(cache, [1, 2, 3, 4]))
    assert cache.match([1, 2, 3, 4, 5]).length == 0
    assert cache.free == 8


def test_hits_are_counted_in_tokens_and_only_for_who_got_pages():
    cache = KVCache(num_pages=5, page_size=2)
    lease = filled(cache, [1, 2, 3, 4])
    refused = cache.match(list(range(1, 20)))
    assert refused.length == 4 and not cache.grow(refused, 19)
    cache.release(refused)
    assert (cache.prefix_queries, cache.prefix_hits) == (4, 0)
    assert cache.grow(cache.match([1, 2, 3, 4, 5]), 5)
    assert (cache.prefix_queries, cache.prefix_hits) == (9, 4)
    cache.release(lease)


def test_an_equal_page_computed_twice_stays_private_and_comes_home():
    cache = KVCache(num_pages=9, page_size=2)
    first, second = cache.match([1, 2, 3]), cache.match([1, 2, 4])
    for lease, tokens in ((first, [1, 2, 3]), (second, [1, 2, 4])):
        assert cache.grow(lease, 3)
        cache.commit(lease, tokens)
    assert not set(first.pages) & set(second.pages)
    cache.release(second)
    assert cache.cached == 0 and cache.free == 6
    cache.release(first)
    assert cache.cached == 1 and cache.free == 7


def test_a_private_page_replaces_its_evicted_twin():
    """Otherwise what follows it would be cached, but could never be found."""
    cache = KVCache(num_pages=5, page_size=2)
    first, second = cache.match([1, 2]), cache.match([1, 2, 3, 4])
    assert cache.grow(first, 2) and cache.grow(second, 4)
    cache.commit(first, [1, 2])
    cache.commit(second, [1, 2, 3, 4])
    cache.release(first)
    other = cache.match([7, 7, 7])
    assert cache.grow(other, 4)  # evicts the page of `first`, the only idle one
    assert cache.evictions == 1
    cache.release(second)
    assert cache.match([1, 2, 3, 4, 5]).length == 4


def test_an_idle_twin_outlives_what_follows_the_private_page():
    cache = KVCache(num_pages=5, page_size=2)
    first, second = cache.match([1, 2]), cache.match([1, 2, 3, 4])
    assert cache.grow(first, 2) and cache.grow(second, 4)
    cache.commit(first, [1, 2])
    cache.commit(second, [1, 2, 3, 4])
    cache.release(first)
    cache.release(second)
    assert cache.grow(cache.match([7, 7, 7]), 6)  # two pages are free, the third is evicted
    assert cache.match([1, 2, 3, 4, 5]).length == 2


def test_leaves_are_evicted_before_what_they_hang_on_and_the_oldest_first():
    cache = KVCache(num_pages=7, page_size=1)
    cache.release(filled(cache, [1, 2, 3]))
    cache.release(filled(cache, [1, 5, 6]))
    assert cache.cached == 5 and cache.free == 1
    lease = cache.match([9])
    assert cache.grow(lease, 2)
    assert cache.match([1, 2, 3, 4]).length == 2  # of 1-2-3, the leaf went
    assert cache.match([1, 5, 6, 4]).length == 3


def test_held_prefixes_are_never_evicted():
    cache = KVCache(num_pages=5, page_size=1)
    cache.release(filled(cache, [1, 2, 3]))
    holder = cache.match([1, 2, 3, 4])
    assert not cache.grow(cache.match([9, 9]), 2)
    assert cache.grow(holder, 4)
    assert cache.evictions == 0


def test_releasing_twice_does_nothing():
    cache = KVCache(num_pages=5, page_size=2, enable_prefix_caching=False)
    lease = filled(cache, [1, 2, 3])
    cache.release(lease)
    cache.release(lease)
    assert cache.free == 4


def test_after_a_reset_nothing_old_is_found_and_nothing_is_lost():
    cache = KVCache(num_pages=9, page_size=2)
    cache.release(filled(cache, [5, 6, 7, 8]))
    old = filled(cache, [1, 2, 3, 4])
    cache.reset()
    assert cache.cached == 0 and cache.free == 6
    assert cache.match([1, 2, 3, 4, 5]).length == 0
    assert cache.grow(old, 6)
    cache.commit(old, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).length == 0
    cache.release(old)
    assert cache.free == 8


def test_what_can_ever_fit():
    cache = KVCache(num_pages=5, page_size=4)
    assert cache.capacity_tokens == 16
    assert cache.fits(16) and not cache.fits(17)


@pytest.mark.parametrize("num_pages, page_size", [(1, 4), (0, 4), (4, 0)])
def test_a_cache_without_room_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match=r"must be at least|give at least"):
        KVCache(num_pages, page_size)


def test_a_growing_sequence_is_named_as_if_at_once():
    tokens = list(range(40))
    at_once: list[bytes] = []
    extend_keys(at_once, tokens, 10, 4, "salt")
    growing: list[bytes] = []
    for pages in range(11):
        extend_keys(growing, tokens[: pages * 4], pages, 4, "salt")
    assert growing == at_once
    assert len(set(at_once)) == 10


class CacheLife(RuleBasedStateMachine):
    """Leases come, grow, compute and go in any order; a model of the device remembers what was written."""

    leases = Bundle("leases")

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 3))
    def start(self, num_pages, page_size):
        self.cache = KVCache(num_pages, page_size)
        self.device: dict[tuple[int, int], tuple] = {}  # (page, offset) -> the prefix that was written there
        self.held: dict[Lease, list[int]] = {}

    @rule(
        target=leases, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from("xy")
    )
    def match(self, tokens, salt):
        lease = self.cache.match(tokens, salt)
        assert lease.length < len(tokens) and lease.length == len(lease.pages) * self.cache.page_size
        for position in range(lease.length):
            assert self.device[self.place(lease, position)] == (salt, *tokens[: position + 1])
        self.held[lease] = tokens
        return lease

    @rule(lease=leases, count=st.integers(1, 12))
    def grow_and_compute(self, lease, count):
        tokens = self.held[lease]
        length = min(count, len(tokens))
        before, available = list(lease.pages), self.cache.available
        if self.cache.grow(lease, length):
            assert lease.pages[: len(before)] == before
            for position in range(lease.length, length):
                self.device[self.place(lease, position)] = (lease.salt, *tokens[: position + 1])
            self.cache.commit(lease, tokens, length)
        else:
            assert lease.pages == before
            assert self.cache.pages_for(length) - len(before) > available

    @rule(lease=consumes(leases))
    def release(self, lease):
        self.cache.release(lease)
        del self.held[lease]

    @rule()
    def reset(self):
        self.cache.reset()

    def place(self, lease: Lease, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.cache.page_size)
        return lease.pages[page], offset

    @invariant()
    def pages_are_conserved(self):
        cache = self.cache
        held = {page for lease in self.held for page in lease.pages}
        assert cache.used == len(held) and 0 not in held
        assert cache.free + cache.used + cache.cached == cache.num_pages - 1

    @invariant()
    def a_page_has_two_holders_only_as_a_shared_prefix(self):
        for lease, tokens in self.held.items():
            for other, others in self.held.items():
                for i in {*lease.pages} & {*other.pages}:
                    end = (lease.pages.index(i) + 1) * self.cache.page_size
                    assert lease.pages.index(i) == other.pages.index(i)
                    assert (lease.salt, tokens[:end]) == (other.salt, others[:end])

    @invariant()
    def every_idle_page_can_still_be_found(self):
        """Its parent is cached and, if idle too, evicted later."""
        index = self.cache._index
        order = list(index.idle)
        parents = {}
        for page in order:
            prefix = self.device[page, self.cache.page_size - 1]
            tokens, keys = list(prefix[1:]), []
            extend_keys(keys, tokens, len(tokens) // self.cache.page_size, self.cache.page_size, prefix[0])
            assert index.find(keys[-1]) == page
            if len(keys) > 1:
                parents[page] = index.find(keys[-2])
        for page, parent in parents.items():
            assert parent is not None
            assert parent not in order or order.index(page) < order.index(parent)


TestCacheLife = CacheLife.TestCase
TestCacheLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
