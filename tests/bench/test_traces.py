"""The generated conversations are the same for a seed, and of the kind that routing is measured with."""

from collections import Counter

from bench.traces import sessions


def test_a_seed_gives_the_same_conversations_and_another_one_others():
    assert sessions(3) == sessions(3) != sessions(4)


def test_tenants_share_their_instructions_and_sessions_have_several_turns():
    drawn = sessions(0, count=64)
    by_tenant = Counter(session.tenant for session in drawn)
    assert len(by_tenant) == 4 and by_tenant[0] == max(by_tenant.values())
    assert len({session.system for session in drawn}) == 4
    assert all(3 <= len(session.turns) <= 8 for session in drawn)
    assert [session.start for session in drawn] == sorted(session.start for session in drawn)
