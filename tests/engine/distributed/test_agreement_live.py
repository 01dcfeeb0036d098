"""Agreement with its threads, and in real processes over gloo's TCPStore."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import holdfast
from holdfast.engine.distributed.agreement import Agreement, LocalAgreement, make_agreement
from holdfast.engine.distributed.group import LocalGroup, StoreGroup, current_group
from holdfast.engine.distributed.kv import Timeouts
from holdfast.errors import RankFailed
from holdfast.testing.fakegroup import FakeGroup

QUICK = (0.0005, 0.002)


def ranks() -> StoreGroup:
    group = current_group()
    assert isinstance(group, StoreGroup)
    return group


@pytest.fixture
def lost() -> Iterator[list[tuple[list[str], Exception]]]:
    told: list[tuple[list[str], Exception]] = []

    def sink(name: str, fields: dict[str, Any]) -> None:
        if name == "not_agreed":
            told.append((fields["wanted"], fields["error"]))

    with holdfast.attach(sink):
        yield told


def agreeing_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "holdfast-agree"]


def test_four_threads_propose_as_they_like_and_all_do_the_same() -> None:
    barrier = threading.Barrier(4)

    def train(rank: int) -> list[tuple[int, str]]:
        agree = Agreement(ranks(), "run", QUICK)
        done: list[tuple[int, str]] = []
        for step in range(1, 100_000):
            done += [(step, what) for what in agree.step()]
            if step % 50 == rank and step < 400:
                agree.propose(f"{rank}.{step}")
            if len(done) == 31:
                break
            time.sleep(0)
        barrier.wait()
        agree.close()
        return sorted(done)

    with FakeGroup(4) as group:
        first, *others = group.run(train)
        assert all(other == first for other in others)
        assert len({what for _, what in first}) == 31
        assert [key for key in group.store.values if not key.startswith("pulse/")] == []
    assert agreeing_threads() == []


def test_nothing_is_looked_at_but_one_key_while_nothing_is_wanted() -> None:
    with FakeGroup(2) as group:
        agrees = [Agreement(group.groups[r], "run", QUICK) for r in range(2)]
        calls: list[tuple[str, str]] = []
        seen = threading.Event()

        def note(name: str, key: str) -> None:
            if not key.startswith("pulse/"):
                calls.append((name, key))
                if len(calls) > 20:
                    seen.set()

        group.views[1].before = note
        assert seen.wait(10)
        assert set(calls) == {("check", "1/run/1")}
        for agree in agrees:
            agree.close()


def test_a_rank_whose_process_dies_is_told_by_name_and_holds_nobody_up(lost: Any) -> None:
    with FakeGroup(3, Timeouts(silent=0.4, stuck=5.0)) as group:
        agrees = [Agreement(r, "run", QUICK) for r in group.groups]
        while any(f"pulse/{r}" not in group.store.values for r in range(3)):
            time.sleep(0.001)
        group.views[2].disconnect()
        began = time.monotonic()
        agrees[1].propose("save")
        while not any(wanted == ["save"] and error.rank == 2 for wanted, error in lost):
            assert agrees[0].step() == agrees[1].step() == frozenset()
            time.sleep(0)
        assert time.monotonic() - began < 5
        error = next(e for wanted, e in lost if wanted == ["save"])
        assert f"Rank 2 on {socket.gethostname()} did not join the agreement on " in str(error)
        for agree in agrees:
            agree.close()


def test_a_rank_that_has_no_agreement_is_told_by_name(lost: Any) -> None:
    """Its process is alive, so this takes ``stuck``."""
    with FakeGroup(2, Timeouts(silent=0.5, stuck=0.6)) as group:
        group.groups[1].kv.start()
        agree = Agreement(group.groups[0], "run", QUICK)
        agree.propose("save")
        while not lost:
            assert agree.step() == frozenset()
        assert lost[0][1].rank == 1
        agree.close()


@pytest.mark.parametrize("when", ["before it acknowledges", "after"])
def test_a_store_that_does_not_answer_is_raised_at_a_gate_only(when: str, lost: Any) -> None:
    with FakeGroup(2, Timeouts(silent=0.4, stuck=5.0)) as group:
        hangs = threading.Event()
        word = "set" if when == "after" else "compare_set"

        def hang(name: str, key: str) -> None:
            if name == word and not key.startswith("pulse/"):
                group.views[0].before = lambda name, key: hangs.wait(20)
                hangs.wait(20)

        group.views[0].before = hang
        agrees = [Agreement(r, "run", QUICK) for r in group.groups]
        agrees[0].propose("save")
        raised: list[RankFailed] = []
        began = time.monotonic()
        more = 1000
        while more:
            try:
                assert agrees[0].step() == frozenset()
            except RankFailed as e:
                raised.append(e)
            more -= bool(lost)
            time.sleep(0)
        assert len(raised) == (when == "after")
        for error in raised:
            assert "cannot agree" in str(error)
            assert "no response within 0.4 s" in str(error.__cause__)
        assert time.monotonic() - began < 5
        agrees[0].propose("stop")
        while lost[-1][0] != ["stop"]:
            time.sleep(0.001)
        hangs.set()
        for agree in agrees:
            agree.close()


def test_a_mistake_in_the_thread_is_told_and_does_not_hold_up_the_training(lost: Any) -> None:
    with FakeGroup(2) as group:
        group.store.set("1/run/1", b"no JSON")
        agree = Agreement(group.groups[0], "run", QUICK)
        agree.propose("save")
        while not lost:
            assert agree.step() == frozenset()
        assert lost[0][0] == ["save"]
        agree.close()


@pytest.mark.parametrize("_", range(8))
def test_closing_twice_and_asking_afterwards_do_no_harm(_: int, lost: Any) -> None:
    with FakeGroup(2) as group:
        agrees = [Agreement(r, "run", QUICK) for r in group.groups]
        agrees[0].close()
        agrees[0].close()
        agrees[0].propose("save")
        assert agrees[0].step() == frozenset()
        agrees[1].propose("save")
        while not lost:
            assert agrees[1].step() == frozenset()
        assert "The training of rank 0 has ended" in str(lost[0][1])
        agrees[1].close()
    assert agreeing_threads() == []


def test_two_agreements_of_one_group_know_nothing_of_each_other() -> None:
    def train(rank: int) -> tuple[list[Any], list[Any]]:
        one, two = (Agreement(ranks(), "run", QUICK) for _ in range(2))
        first, second = [], []
        one.propose("a")
        while not second:
            first += [*one.step()]
            if first and not second:
                two.propose("b")
            second += [*two.step()]
            time.sleep(0)
        one.close()
        two.close()
        return first, second

    with FakeGroup(2) as group:
        assert group.run(train) == [(["a"], ["b"])] * 2


def test_the_agreement_of_one_process(lost: Any) -> None:
    agree = make_agreement(LocalGroup(), "run")
    assert isinstance(agree, LocalAgreement)
    assert agree.step() == frozenset()
    agree.propose("save")
    agree.propose("save")
    agree.propose("stop")
    assert agree.step() == {"save", "stop"}
    assert agree.step() == frozenset()
    agree.propose("late")
    agree.close()
    assert [wanted for wanted, _ in lost] == [["late"]]


def test_it_may_be_proposed_in_a_signal_handler_at_any_moment() -> None:
    """Also while the same thread waits at the gate, holding its lock."""
    with FakeGroup(2) as group:
        agrees = [Agreement(r, "run", QUICK) for r in group.groups]
        before = signal.signal(signal.SIGUSR1, lambda *_: agrees[0].propose("stop"))
        try:
            kill = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            other = threading.Thread(target=lambda: until(agrees[1], "stop"))
            kill.start()
            other.start()
            until(agrees[0], "stop")
            other.join(10)
            assert not other.is_alive()
        finally:
            signal.signal(signal.SIGUSR1, before)
            for agree in agrees:
                agree.close()


def until(agree: Agreement, what: str) -> int:
    """Steps until it is to be done."""
    for step in range(10**9):
        if what in agree.step():
            return step
    raise AssertionError


# -- real processes -------------------------------------------------------------------------------

COMMON = """
import os, sys, time, signal, json
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from holdfast.engine.distributed.agreement import Agreement
from holdfast.engine.distributed.group import current_group
from holdfast.errors import RankFailed
rank, size, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
"""

STEPS = (
    COMMON
    + """
store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
agree = Agreement(current_group(), "run", (0.01, 0.05))
value = torch.ones(1)
dist.all_reduce(value)

def refuse(*args, **kwargs):
    raise AssertionError("a collective in the step")

WORDS = ("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv")
COLLECTIVES = [n for n in dir(dist) if callable(getattr(dist, n)) and any(w in n for w in WORDS)]
assert len(COLLECTIVES) > 25, COLLECTIVES
real = [(m, n, getattr(m, n)) for m in (dist, c10d) for n in COLLECTIVES if hasattr(m, n)]
GROUP = dist.ProcessGroup
real += [(GROUP, n, vars(GROUP)[n]) for n in (
    "allreduce", "allgather", "broadcast", "barrier", "reduce", "gather", "scatter",
    "reduce_scatter", "alltoall", "send", "recv")]

def patch(on):
    for module, name, call in real:
        setattr(module, name, refuse if on else call)

done, spent, proposals = [], [], 0
for step in range(1, 10_001):
    if step % 100 == 1:  # as gradients do, at times; far apart, so that ranks run ahead
        patch(False)
        dist.all_reduce(value)
        patch(True)
    if step in (1, 2500 + rank, 5000, 8000 - rank):
        agree.propose(f"{rank}.{step}")
        proposals += 1
    began = time.perf_counter_ns()
    whats = agree.step()
    spent.append(time.perf_counter_ns() - began)
    done += [(step, what) for what in sorted(whats)]
    time.sleep(0)
patch(False)
spent.sort()
agree.close()
dist.barrier()
print(json.dumps({"done": done, "proposals": proposals, "median": spent[5000], "most": spent[-1]}))
dist.destroy_process_group()
"""
)

HOST = (
    COMMON
    + """
store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
print("up", flush=True)
time.sleep(600)
"""
)

ORPHAN = (
    COMMON
    + """
import holdfast
told = []
holdfast.attach(lambda name, fields: told.append((name, fields["wanted"])))
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
agree = Agreement(current_group(), "run")
value, agreed = torch.ones(1), []
while not agreed:
    agree.propose("save")
    agreed += agree.step()
    dist.all_reduce(value)
print("agreed", flush=True)
if rank == 0:
    sys.stdin.readline()  # the host is gone
dist.all_reduce(value)
began = time.monotonic()
raised = returned = 0
longest = 0.0
while (time.monotonic() - began < 2 or not told) and time.monotonic() - began < 30:
    agree.propose("later")
    before = time.monotonic()
    try:
        returned += len(agree.step())
    except RankFailed:
        raised += 1
    longest = max(longest, time.monotonic() - before)
    time.sleep(0.001)
print(json.dumps({"raised": raised, "returned": returned, "longest": longest, "told": told}))
sys.stdout.flush()
os._exit(0)
"""
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """Ends what was started in a test."""
    with ExitStack() as stack:
        yield stack


def spawn(
    ending: ExitStack, body: str, rank: int, port: int, **environ: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", body, str(rank), "2", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )
    ending.enter_context(process)
    ending.callback(process.kill)
    return process


def said(process: subprocess.Popen[str], word: str = "") -> Any:
    out, errors = process.communicate(word, timeout=120)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_ten_thousand_steps_in_two_processes_with_no_collective_in_a_step(
    ending: ExitStack,
) -> None:
    port = free_port()
    first, second = (said(p) for p in [spawn(ending, STEPS, rank, port) for rank in range(2)])
    assert first["done"] == second["done"]
    whats = [what for _, what in first["done"]]
    assert len(whats) == len(set(whats)) == first["proposals"] + second["proposals"]
    print(f"a step: median {first['median']} ns, {second['median']} ns")


@pytest.mark.slow
def test_where_the_host_of_the_store_is_killed_a_step_returns_or_raises_within_the_bound(
    ending: ExitStack,
) -> None:
    port = free_port()
    host = spawn(ending, HOST, 0, port)
    assert host.stdout is not None
    host.stdout.readline()
    both = [
        spawn(ending, ORPHAN, rank, port, HOLDFAST_SILENT="2", HOLDFAST_STUCK="5")
        for rank in (0, 1)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "agreed"
    host.kill()
    host.wait()
    for got in [said(process, "go\n") for process in both]:
        assert got["raised"] <= 1
        assert got["longest"] < 10
        assert ["not_agreed", ["later"]] in got["told"]
