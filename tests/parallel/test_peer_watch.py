"""Heart-beats of ranks on other hosts: who is missed, when, and what a dead store means."""

import threading

from engine.parallel.peer_watch import PeerWatch


class FakeStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False

    def set(self, key, value):
        if self.gone:
            raise RuntimeError("Broken pipe\nmore")
        self.values[key] = value.encode()

    def multi_get(self, keys):
        return [self.values[key] for key in keys]


def pair(now, **more):
    store = FakeStore()
    return store, [PeerWatch(store, rank, 2, lambda reason: None, lost_s=10, clock=lambda: now[0], **more) for rank in range(2)]


def test_a_rank_that_stops_beating_is_missed_after_the_limit_and_no_earlier():
    now = [0.0]
    _, (first, second) = pair(now)
    assert first.find_lost() == ""
    for now[0] in (5.0, 10.0, 14.0):
        first.beat()
        if now[0] < 6:
            second.beat()
        assert first.find_lost() == ""
    now[0] = 15.5
    assert first.find_lost() == "rank 1 has not been heard of for 10 s"
    assert second.find_lost() == ""


def test_a_dead_store_is_a_lost_host_and_reported_once():
    store, reasons, told = FakeStore(), [], threading.Event()

    def on_lost(reason):
        reasons.append(reason)
        told.set()

    PeerWatch(store, 1, 2, lambda reason: None)
    watch = PeerWatch(store, 0, 2, on_lost, beat_s=0.01)
    watch.start()
    store.gone = True
    assert told.wait(5)
    assert reasons == ["the host of rank 0 does not answer: Broken pipe"]


def test_a_closed_watch_says_nothing():
    store, reasons = FakeStore(), []
    PeerWatch(store, 1, 2, reasons.append)
    watch = PeerWatch(store, 0, 2, reasons.append, beat_s=0.01)
    watch.close()
    watch.start()
    store.gone = True
    assert not threading.Event().wait(0.1)
    assert reasons == []


def test_a_store_that_never_answers_is_a_lost_host():
    """A host that is cut off closes nothing: calls to its store do not return."""
    store, reasons, told, never = FakeStore(), [], threading.Event(), threading.Event()

    def on_lost(reason):
        reasons.append(reason)
        told.set()

    PeerWatch(store, 1, 2, lambda reason: None)
    watch = PeerWatch(store, 0, 2, on_lost, beat_s=0.01, lost_s=0.2)
    store.multi_get = lambda keys: never.wait(30) and [b"1"] * len(keys)
    watch.start()
    assert told.wait(5)
    never.set()
    assert reasons == ["the host of rank 0 has not answered for 0.2 s"]
