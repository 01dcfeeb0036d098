"""Leases: one holder, an end that compares no clocks, and versions that are protected meanwhile."""

import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import msgspec
import pytest

from limpet import events
from limpet.errors import LimpetError, Unavailable
from limpet.format.names import Version, lease_name
from limpet.format.records import encode_record
from limpet.run import lease as leases
from limpet.run.lease import LeaseHolder, LeaseObserver, list_leases, read_lease
from limpet.run.policy import KeepLast
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.run.test_retention import make_run
from tests.unreliable_stores import HookedStore
from tests.waiting import run_threads

V1, V2 = Version(1), Version(2)


@dataclass
class Clock:
    """A clock whose ``wait`` lets time pass, and runs what is due meanwhile."""

    now: float = 100.0
    due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def __call__(self):
        return self.now

    def at(self, seconds, action):
        self.due.append((self.now + seconds, action))

    def wait(self, seconds):
        self.now += seconds
        ready = [action for at, action in self.due if at <= self.now]
        self.due = [(at, action) for at, action in self.due if at > self.now]
        for action in ready:
            action()


def holder(store, clock, name="val", **more):
    return LeaseHolder(store, name, 10.0, clock=clock, wait=clock.wait, **more)


def acquired(*arguments, **options):
    held = holder(*arguments, **options)
    held.acquire()
    return held


def replace_file(store, change):
    """Replace the file of the only lease by ``change`` of it. Return its key."""
    (key,) = list_leases(store)
    data = change(read_lease(store, key))
    store.delete(key)
    store.put_if_absent(key, data)
    return key


def end_process(lease):
    """As if the process that holds the lease had ended on this machine."""
    return encode_record(msgspec.structs.replace(lease, process="4194304:1"))


@pytest.fixture
def elsewhere(monkeypatch):
    """A context in which this process is one on another machine, which nobody can check."""

    @contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(
                leases.machine, "process_identity", lambda: ("elsewhere", "boot", "4711:12")
            )
            yield

    return context


def test_a_lease_protects_its_versions_from_retention_until_it_is_released():
    store = make_run(1, 2, 3, 4)
    held = LeaseHolder(store, "val", 0.3)
    held.acquire()
    held.start()
    held.protect([V1])
    assert [v.step for v in Run(store).retain(KeepLast(1))] == [2, 3]
    with pytest.raises(LimpetError, match="the evaluation val is using it"):
        Run(store).delete(V1)
    held.protect([])
    assert Run(store).retain(KeepLast(1)) == [V1]
    held.release()
    assert list_leases(store) == []


def test_a_lease_of_a_crashed_evaluator_ends_after_its_time_on_the_clock_of_the_observer(elsewhere):
    store, clock = make_run(1, 2, 3), Clock()
    with elsewhere():
        held = acquired(store, Clock(now=5e9))  # its clock is of no importance
        held.protect([V1])
    run = Run(store)
    run.catalog.leases = LeaseObserver(run.store, clock)
    assert run.retain(KeepLast(1)) == [V2]
    clock.wait(9.9)
    assert run.retain(KeepLast(1)) == []
    clock.wait(0.2)
    assert run.retain(KeepLast(1)) == [V1]


def test_each_renewal_extends_the_lease(elsewhere):
    store, clock = make_run(1, 2, 3), Clock()
    observer = LeaseObserver(store, clock)
    with elsewhere():
        held = acquired(store, clock)
        for _ in range(5):
            held.protect([V1])
            assert [lease.versions for lease in observer.live().values()] == [["version_1"]]
            clock.wait(9)
    assert len(observer.live()) == 1
    assert len(list_leases(store)) == 1, "the files of earlier renewals are deleted"
    clock.wait(1.1)
    assert observer.live() == {}


def test_the_lease_of_a_process_that_has_ended_on_this_machine_ends_at_once():
    store, clock = MemoryStore(), Clock()
    acquired(store, clock)
    replace_file(store, end_process)
    assert LeaseObserver(store, clock).live() == {}
    before = clock.now
    acquired(store, clock)
    assert clock.now == before, "the takeover waits for nothing"


def test_a_second_evaluation_of_the_same_name_is_refused_when_the_first_renews():
    store, clock = MemoryStore(), Clock()
    first = acquired(store, clock)
    clock.at(3, lambda: first.protect([]))
    with pytest.raises(LimpetError, match=r"Another process evaluates .* under the name val"):
        acquired(store, clock)
    assert clock.now < 100 + 5
    acquired(store, clock, "test")
    first.check()


def test_another_process_takes_over_within_the_time_of_the_lease(elsewhere):
    store, clock = MemoryStore(), Clock()
    with elsewhere():
        first = acquired(store, clock)
    second = acquired(store, clock)
    assert 10 <= clock.now - 100 <= 12
    second.protect([V2])
    with pytest.raises(LimpetError, match=r"lost\b.*taken the evaluation over"):
        first.protect([V1])
    assert [lease.versions for lease in LeaseObserver(store, clock).live().values()] == [
        ["version_2"]
    ]


def test_a_lease_whose_run_was_moved_is_lost():
    store = MemoryStore()
    held = acquired(store, Clock())
    for key in list_leases(store):
        store.delete(key)
    with pytest.raises(LimpetError, match=r"lost\b.*or the run was moved or deleted"):
        held.protect([V1])


def test_of_many_processes_that_take_a_lease_over_one_gets_it(elsewhere):
    store = MemoryStore()
    with elsewhere():
        acquired(store, Clock())
    winners: list[LeaseHolder] = []
    barrier = threading.Barrier(8)

    def take():
        clock = Clock()
        own = holder(store, clock)
        barrier.wait(20)
        with suppress(LimpetError):
            own.acquire()
            winners.append(own)

    run_threads(threading.Thread(target=take) for _ in range(8))
    held = []
    for own in winners * 2:  # who was overtaken finds that out
        with suppress(LimpetError):
            own.protect([])
            held.append(own)
    assert len(set(held)) == 1
    assert len(list_leases(store)) == 1


def test_a_lease_that_has_the_number_of_an_earlier_one_protects_its_versions():
    """A training looks once in a while, and saw the file of an evaluation that has ended since."""
    store, clock = make_run(1, 2, 3), Clock()
    run = Run(store)
    run.catalog.leases = LeaseObserver(run.store, clock)
    first = acquired(store, clock)
    first.protect([V1])
    assert run.retain(KeepLast(3)) == []
    seen = list_leases(store)
    first.release()
    clock.wait(600)
    second = acquired(store, clock)
    second.protect([V2])
    assert list_leases(store) == seen
    assert run.retain(KeepLast(1)) == [V1]
    clock.wait(9)
    assert run.retain(KeepLast(1)) == []


def test_a_process_that_was_stopped_takes_no_later_lease_with_its_number_for_its_own(elsewhere):
    store, clock = MemoryStore(), Clock()
    with elsewhere():
        stopped = acquired(store, clock)
        second = acquired(store, clock)
        second.release()
        third = acquired(store, clock)
        with pytest.raises(LimpetError, match="taken the evaluation over"):
            stopped.protect([V1])
        stopped.release()
        third.protect([V2])
    assert len(list_leases(store)) == 1


def test_a_renewal_between_the_listing_and_the_read_does_not_end_the_protection(monkeypatch):
    store, clock = make_run(1, 2, 3), Clock()
    held = acquired(store, clock)
    held.protect([V1])
    run, renewals = Run(store), [None]

    def read(*arguments):
        if renewals:
            renewals.pop()
            held.protect([V1])
        return read_lease(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(leases, "read_lease", read)
        assert run.retain(KeepLast(1)) == [V2]
    held.release()
    assert run.retain(KeepLast(1)) == [V1]


def test_a_listing_that_shows_a_deleted_lease_for_long_protects_nothing():
    store = make_run(1, 2)
    assert LeaseObserver(store).live([lease_name("val", 7)]) == {}


@pytest.mark.parametrize(("failures", "is_lost"), [(2, False), (50, True)])
def test_a_store_that_fails_costs_the_lease_only_if_it_fails_for_its_time(failures, is_lost):
    store, clock, lost = HookedStore(MemoryStore()), Clock(), list[LimpetError]()
    held = acquired(store, clock, on_lost=lost.append)
    remaining = iter(range(failures))

    def fail(method, key):
        if method == "put_if_absent" and next(remaining, None) is not None:
            raise Unavailable("503", store=store.url)

    store.before = fail
    clock.at(60, held._closing.set)
    held._renew_regularly()
    assert bool(lost) == is_lost
    if is_lost:
        assert clock.now - 100 <= 15
        with pytest.raises(Unavailable):
            held.protect([])
    else:
        held.protect([])


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_one_error_of_the_store_in_a_renewal_does_not_lose_the_lease(
    fails_at, takes_effect, monkeypatch
):
    store, clock, lost = HookedStore(MemoryStore()), Clock(), list[LimpetError]()
    calls = count(1)

    def fail(method, key):
        if next(calls) == fails_at:
            raise Unavailable("503", store=store.url)

    def now():
        return f"2026-01-02T03:04:{int(clock.now) % 60:02}+00:00"

    monkeypatch.setattr(leases.machine, "utc_now", now)  # so each renewal has other bytes
    held = acquired(store, clock, on_lost=lost.append)
    setattr(store, "after" if takes_effect else "before", fail)
    clock.at(15, held._closing.set)
    held._renew_regularly()
    assert next(calls) > fails_at
    assert lost == []
    held.protect([V1])
    (lease,) = LeaseObserver(store, clock).live().values()
    assert lease.versions == ["version_1"]
    assert len(list_leases(store)) == 1


class Hanging(MemoryStore):
    hangs, ends = threading.Event(), threading.Event()

    def put_if_absent(self, key, data):
        if ".1." not in key:
            self.hangs.set()
            self.ends.wait(20)
        return super().put_if_absent(key, data)


def test_the_end_of_an_evaluation_does_not_wait_for_a_store_that_hangs(monkeypatch):
    monkeypatch.setattr(leases, "_MAX_JOIN", 0.1)
    store = Hanging()
    held = LeaseHolder(store, "val", 0.1)
    held.acquire()
    held.start()
    assert store.hangs.wait(10)
    released = threading.Thread(target=held.release)
    released.start()
    released.join(5)
    assert not released.is_alive()
    store.ends.set()
    held._thread.join(10)


def test_a_damaged_file_does_not_keep_the_lease_from_its_end(monkeypatch):
    store, clock = MemoryStore(), Clock()
    store.put_if_absent(lease_name("val", 1), b"{}")
    held = acquired(store, clock)
    store.put_if_absent(lease_name("val", 1), b"{}")
    monkeypatch.setattr(leases, "list_leases", lambda *run: sorted(list_leases(*run)))
    held.release()
    assert list_leases(store) == [lease_name("val", 1)]


def test_a_renewal_replaces_a_damaged_file():
    store, clock = MemoryStore(), Clock()
    held = acquired(store, clock)
    replace_file(store, lambda lease: b"{}")
    held.protect([V1])
    (lease,) = LeaseObserver(store, clock).live().values()
    assert lease.versions == ["version_1"]


def test_a_damaged_lease_protects_every_version_for_the_time_of_a_lease():
    """Its holder replaces it within that time."""
    store, clock, seen = make_run(1, 2, 3), Clock(), list[str]()
    store.put_if_absent(key := lease_name("val", 3), b"{}")
    run = Run(store)
    run.catalog.leases = LeaseObserver(store, clock)
    with events.attach(lambda name, fields: seen.append(name)):
        assert run.retain(KeepLast(2)) == []
        clock.now += leases.LEASE_SECONDS
        assert run.retain(KeepLast(2)) == [V1]
        assert run.sweep().removed == [key]
    assert seen.count("skipped") == 1


def test_who_deletes_on_request_waits_until_a_damaged_lease_is_replaced(monkeypatch):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.2)
    store = make_run(1, 2)
    store.put_if_absent(key := lease_name("val", 3), b"{}")
    assert Run(store).sweep().removed == [key]
    store.put_if_absent(key, b"{}")
    assert Run(store).delete(1) > 0


def test_a_process_that_has_just_started_waits_for_a_renewal(elsewhere):
    store, clock = make_run(1, 2, 3), Clock()
    with elsewhere():
        gone = acquired(store, clock)
        gone.protect([V1])
        alive = acquired(store, clock, "test")
        alive.protect([V2])
        for seconds in range(3, 30, 3):
            clock.at(seconds, lambda: alive.protect([V2]))
        observer = LeaseObserver(store, clock)
        observer.confirm(clock.wait)
    assert [lease.name for lease in observer.live().values()] == ["test"]
    assert clock.now - 100 < 12


def test_sweep_removes_the_file_of_a_lease_that_has_ended():
    store = make_run(1)
    acquired(store, Clock())
    key = replace_file(store, end_process)
    assert key in Run(store).sweep().removed
    assert list_leases(store) == []
