"""A lease ends exactly once: released, or by itself when nobody renews it, whatever else the process does."""

import threading

from kv.leases import Leases


def test_a_lease_that_nobody_renews_ends_by_itself():
    ended, expiries = threading.Event(), []
    leases = Leases(0.05, lambda: expiries.append(1))
    name = leases.grant(lambda read: ended.set())
    assert ended.wait(20)
    assert not leases.renew(name) and not leases.release(name)
    assert len(leases) == 0 and expiries == [1]
    leases.close()


def test_a_lease_ends_once_and_hears_how_far_it_was_read():
    heard: list[int] = []
    leases = Leases(3600)
    first, second, third = (leases.grant(heard.append) for _ in range(3))
    assert leases.renew(first, 2)
    assert leases.release(first, 1) and not leases.release(first, 5)
    assert leases.release(second)
    assert heard == [2, 0] and len(leases) == 1
    leases.close()
    assert heard == [2, 0, 0] and not leases.renew(third)


def test_what_ends_a_lease_may_use_the_leases():
    leases = Leases(0.05)
    done = threading.Event()

    def again(read: int) -> None:
        leases.release(leases.grant(lambda read: done.set()))

    leases.grant(again)
    assert done.wait(20)
    leases.close()
