"""Who follows a cache's events knows exactly what it can find, and notices whatever was missed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv import KVCache
from kv.events import Change, Events, Gap, Mirror, short
from kv.hashing import extend_keys

PAGE = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), PROMPTS),
        st.tuples(st.just("begin"), PROMPTS),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("renew"), st.none()),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=40,
)


def catch_up(events: Events, mirror: Mirror) -> None:
    """As a follower does: take the changes, or a snapshot if they are gone."""
    changes = events.since(mirror.number) if mirror.stream == events.stream else None
    if changes is None:
        mirror.restart(events.stream, *events.snapshot())
    else:
        mirror.follow(events.stream, mirror.number, changes)


def findable(cache: KVCache) -> set[bytes]:
    return {short(key) for key in cache._index._page_of}


@settings(max_examples=150)
@given(acts=ACTS, pages=st.integers(2, 9), keep=st.integers(0, 8))
def test_the_mirror_is_what_the_cache_can_find_whatever_happens(acts, pages, keep):
    events = Events(keep)
    cache, mirror, leases = KVCache(pages, PAGE, True, events), Mirror(), []
    for act, what in acts:
        if act in ("serve", "begin"):
            lease = cache.match(what)
            if cache.grow(lease, len(what)):
                cache.commit(lease, what)
                leases.append(lease)
            if act == "serve":
                cache.release(lease)
        elif act == "end" and leases:
            cache.release(leases.pop(what % len(leases)))
        elif act == "reset":
            cache.reset()
        elif act == "renew":
            cache, leases = cache.renewed(), []
        elif act == "look":
            catch_up(events, mirror)
            assert mirror.pages == findable(cache)
    catch_up(events, mirror)
    assert mirror.pages == findable(cache)


@given(prompt=PROMPTS, other=PROMPTS)
def test_the_mirror_finds_as_much_of_a_prompt_as_the_cache(prompt, other):
    events, mirror = Events(), Mirror()
    cache = KVCache(20, PAGE, True, events)
    lease = cache.match(other)
    assert cache.grow(lease, len(other))
    cache.commit(lease, other)
    catch_up(events, mirror)
    probe = [*prompt, 9]
    keys: list[bytes] = []
    found = cache.match(probe, keys=keys).length
    extend_keys(keys, probe, (len(probe) - 1) // PAGE, PAGE, "")
    assert mirror.match([short(key) for key in keys][: (len(probe) - 1) // PAGE]) * PAGE == found


def test_several_caches_are_followed_as_one():
    events, mirror = Events(), Mirror()
    caches = [KVCache(3, PAGE, True, events) for _ in range(2)]
    for cache in caches:
        lease = cache.match([1, 2, 3])
        cache.grow(lease, 3)
        cache.commit(lease, [1, 2, 3])
        cache.release(lease)
    caches[0].reset()
    catch_up(events, mirror)
    assert mirror.pages == findable(caches[1])
    caches[1].reset()
    catch_up(events, mirror)
    assert mirror.pages == set()


@pytest.mark.parametrize("stream, after", [("another", 2), ("s", 1), ("s", 3)])
def test_a_gap_is_noticed_and_changes_nothing(stream, after):
    mirror = Mirror()
    mirror.restart("s", 2, [b"a"])
    with pytest.raises(Gap):
        mirror.follow(stream, after, [Change(True, b"b")])
    assert (mirror.number, mirror.pages) == (2, {b"a"})


def test_changes_that_are_not_kept_any_more_are_not_made_up():
    events = Events(keep=2)
    for number in range(5):
        events.stored(bytes([number]))
    assert events.since(2) is None and events.since(6) is None
    changes = events.since(3)
    assert changes is not None and [change.page for change in changes] == [b"\3", b"\4"]
    assert events.since(5) == []
