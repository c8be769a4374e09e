"""Processes find each other or say why not; what the leader sends arrives in order; who dies is missed at once."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sharding.hosts import Follower, Leader, Lost


@pytest.fixture(autouse=True)
def nobody_gives_up(monkeypatch):
    """A process that loses its engine ends; here all of them are the test."""
    monkeypatch.setattr("sharding.hosts.give_up", lambda why: None)


TERMS = {"model": "tiny", "tensor_parallel_size": 2}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assembled(*followers: tuple[int, dict], timeout: float = 30.0) -> tuple[Any, list[Any]]:
    """(the leader or why there is none, the same for each follower) of processes played by threads."""
    port = free_port()

    def attempt(make, *args):
        try:
            return make("127.0.0.1", port, *args, timeout)
        except Lost as why:
            return why

    with ThreadPoolExecutor(8) as threads:
        leader = threads.submit(attempt, Leader, len(followers), TERMS)
        others = [threads.submit(attempt, Follower, rank, terms) for rank, terms in followers]
        return leader.result(), [other.result() for other in others]


def test_what_the_leader_sends_arrives_in_order_at_every_follower():
    leader, followers = assembled((1, TERMS), (2, TERMS))
    sent = [(1, b""), (2, b"abc" * 100_000), (3, b"x")]
    for kind, body in sent:
        leader.send(kind, body[:1], body[1:])
    for follower in followers:
        frames = follower.frames()
        assert [next(frames) for _ in sent] == sent
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(leader.stop, 9)
        assert [next(follower.frames()) for follower in followers] == [(9, b"")] * 2
        assert not stopping.done(), "the leader outlives its followers"
        for follower in followers:
            follower.close()
        stopping.result(10)


def test_a_follower_that_dies_is_missed_and_the_others_are_let_go():
    leader, (first, second) = assembled((1, TERMS), (2, TERMS))
    told, why = threading.Event(), []
    leader.on_lost = lambda reason: (why.append(reason), told.set())
    first._closing = True
    first._peer.shutdown(socket.SHUT_RDWR)  # what the system does for a process that was killed
    assert told.wait(20) and "process 1" in why[0] and "restart all" in why[0]
    second._closing = True
    with pytest.raises(Lost, match="the leader has gone"):
        list(second.frames())
    with pytest.raises(Lost):
        leader.send(1, b"nobody listens")
    assert len(why) == 1
    for follower in (first, second):
        follower.close()


def test_processes_with_other_settings_are_refused_by_name():
    leader, (follower,) = assembled((1, TERMS | {"tensor_parallel_size": 4}))
    for refusal in (leader, follower):
        assert isinstance(refusal, Lost)
        assert "process 1 was started with tensor_parallel_size=4" in str(refusal) and "2" in str(refusal)


def test_two_processes_of_one_rank_are_refused():
    leader, followers = assembled((1, TERMS), (1, TERMS), timeout=2.0)
    assert isinstance(leader, Lost) and "two processes have rank 1" in str(leader)
    for follower in followers:
        if isinstance(follower, Follower):
            follower.close()


def test_who_did_not_come_is_known_by_those_who_did():
    port = free_port()
    with pytest.raises(Lost, match="0 of 3 followers came"):
        Leader("127.0.0.1", port, 3, TERMS, timeout=0.2)
    with pytest.raises(Lost, match="no leader at"):
        Follower("127.0.0.1", port, 1, TERMS, timeout=0.2)
