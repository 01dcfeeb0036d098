"""Agreement with its real threads, and in real processes with a TCPStore."""

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

import limpet
from limpet.errors import RankFailed
from limpet.ranks.agreement import Agreement, LocalAgreement, make_agreement
from limpet.ranks.group import Group, current_group
from limpet.ranks.kv import Timeouts
from tests.fakegroup import FakeGroup

FAST_POLL = (0.0005, 0.002)


def store_group() -> Group:
    group = current_group()
    assert group.kv is not None
    return group


@pytest.fixture
def failed_proposals() -> Iterator[list[tuple[list[str], Exception]]]:
    """Collect the actions and the error of each event ``not_agreed``."""
    reports: list[tuple[list[str], Exception]] = []

    def sink(name: str, fields: dict[str, Any]) -> None:
        if name == "not_agreed":
            reports.append((fields["wanted"], fields["error"]))

    with limpet.attach(sink):
        yield reports


def agreement_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "limpet-agree"]


def test_four_threads_that_propose_at_random_perform_the_same_actions() -> None:
    barrier = threading.Barrier(4)

    def train(rank: int) -> list[tuple[int, str]]:
        agreement = Agreement(store_group(), "run", FAST_POLL)
        done: list[tuple[int, str]] = []
        for step in range(1, 100_000):
            done += [(step, action) for action in agreement.step()]
            if step % 50 == rank and step < 400:
                agreement.propose(f"{rank}.{step}")
            if len(done) == 31:
                break
            time.sleep(0)
        barrier.wait()
        agreement.close()
        return sorted(done)

    with FakeGroup(4) as group:
        first, *others = group.run(train)
        assert all(other == first for other in others)
        assert len({action for _, action in first}) == 31
        assert [key for key in group.store.values if not key.startswith("heartbeat/")] == []
    assert agreement_threads() == []


def test_only_one_key_is_polled_while_nothing_is_proposed() -> None:
    with FakeGroup(2) as group:
        agreements = [Agreement(group.groups[r], "run", FAST_POLL) for r in range(2)]
        calls: list[tuple[str, str]] = []
        seen = threading.Event()

        def record(name: str, key: str) -> None:
            if not key.startswith("heartbeat/"):
                calls.append((name, key))
                if len(calls) > 20:
                    seen.set()

        group.views[1].before = record
        assert seen.wait(10)
        assert set(calls) == {("check", "1/run/1")}
        for agreement in agreements:
            agreement.close()


def test_a_rank_whose_process_dies_is_named_and_does_not_block_the_others(
    failed_proposals: Any,
) -> None:
    with FakeGroup(3, Timeouts(silent=0.4, stuck=5.0)) as group:
        agreements = [Agreement(r, "run", FAST_POLL) for r in group.groups]
        while any(f"heartbeat/{r}" not in group.store.values for r in range(3)):
            time.sleep(0.001)
        group.views[2].disconnect()
        began = time.monotonic()
        agreements[1].propose("save")
        while not any(wanted == ["save"] and error.rank == 2 for wanted, error in failed_proposals):
            assert agreements[0].step() == agreements[1].step() == frozenset()
            time.sleep(0)
        assert time.monotonic() - began < 5
        error = next(e for wanted, e in failed_proposals if wanted == ["save"])
        assert f"Rank 2 on {socket.gethostname()} did not join the agreement on " in str(error)
        for agreement in agreements:
            agreement.close()


def test_a_rank_without_an_agreement_is_named(failed_proposals: Any) -> None:
    """The process of that rank is alive, so the detection takes ``Timeouts.stuck``."""
    with FakeGroup(2, Timeouts(silent=0.5, stuck=0.6)) as group:
        group.groups[1].kv.start()
        agreement = Agreement(group.groups[0], "run", FAST_POLL)
        agreement.propose("save")
        while not failed_proposals:
            assert agreement.step() == frozenset()
        assert failed_proposals[0][1].rank == 1
        agreement.close()


@pytest.mark.parametrize("when", ["before it acknowledges", "after"])
def test_a_rank_raises_only_if_the_store_stops_responding_after_it_acknowledged(
    when: str, failed_proposals: Any
) -> None:
    with FakeGroup(2, Timeouts(silent=0.4, stuck=5.0)) as group:
        release = threading.Event()
        word = "set" if when == "after" else "compare_set"

        def hang(name: str, key: str) -> None:
            if name == word and not key.startswith("heartbeat/"):
                group.views[0].before = lambda name, key: release.wait(20)
                release.wait(20)

        group.views[0].before = hang
        agreements = [Agreement(r, "run", FAST_POLL) for r in group.groups]
        agreements[0].propose("save")
        raised: list[RankFailed] = []
        began = time.monotonic()
        remaining = 1000
        while remaining:
            try:
                assert agreements[0].step() == frozenset()
            except RankFailed as e:
                raised.append(e)
            remaining -= bool(failed_proposals)
            time.sleep(0)
        assert len(raised) == (when == "after")
        for error in raised:
            assert "cannot agree" in str(error)
            assert "no response within 0.4 s" in str(error.__cause__)
        assert time.monotonic() - began < 5
        agreements[0].propose("stop")
        while failed_proposals[-1][0] != ["stop"]:
            time.sleep(0.001)
        release.set()
        for agreement in agreements:
            agreement.close()


def test_an_error_in_the_thread_is_reported_and_does_not_block_the_training(
    failed_proposals: Any,
) -> None:
    with FakeGroup(2) as group:
        group.store.set("1/run/1", b"no JSON")
        agreement = Agreement(group.groups[0], "run", FAST_POLL)
        agreement.propose("save")
        while not failed_proposals:
            assert agreement.step() == frozenset()
        assert failed_proposals[0][0] == ["save"]
        agreement.close()


@pytest.mark.parametrize("_", range(8))
def test_an_agreement_may_be_closed_twice_and_proposals_after_that_fail(
    _: int, failed_proposals: Any
) -> None:
    with FakeGroup(2) as group:
        agreements = [Agreement(r, "run", FAST_POLL) for r in group.groups]
        agreements[0].close()
        agreements[0].close()
        agreements[0].propose("save")
        assert agreements[0].step() == frozenset()
        agreements[1].propose("save")
        while not failed_proposals:
            assert agreements[1].step() == frozenset()
        assert "The training of rank 0 has ended" in str(failed_proposals[0][1])
        agreements[1].close()
    assert agreement_threads() == []


def test_two_agreements_of_one_group_are_independent() -> None:
    def train(rank: int) -> tuple[list[Any], list[Any]]:
        one, two = (Agreement(store_group(), "run", FAST_POLL) for _ in range(2))
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


def test_a_single_process_agrees_with_itself(failed_proposals: Any) -> None:
    agreement = make_agreement(Group(), "run")
    assert isinstance(agreement, LocalAgreement)
    assert agreement.step() == frozenset()
    agreement.propose("save")
    agreement.propose("save")
    agreement.propose("stop")
    assert agreement.step() == {"save", "stop"}
    assert agreement.step() == frozenset()
    agreement.propose("late")
    agreement.close()
    assert [wanted for wanted, _ in failed_proposals] == [["late"]]


def test_a_signal_handler_may_propose_an_action_at_any_moment() -> None:
    """This also holds while the same thread waits at the gate and holds its lock."""
    with FakeGroup(2) as group:
        agreements = [Agreement(r, "run", FAST_POLL) for r in group.groups]
        before = signal.signal(signal.SIGUSR1, lambda *_: agreements[0].propose("stop"))
        try:
            kill = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            other = threading.Thread(target=lambda: step_until(agreements[1], "stop"))
            kill.start()
            other.start()
            step_until(agreements[0], "stop")
            other.join(10)
            assert not other.is_alive()
        finally:
            signal.signal(signal.SIGUSR1, before)
            for agreement in agreements:
                agreement.close()


def step_until(agreement: Agreement, action: str) -> int:
    """Make steps until the action is due. Return the number of steps before that."""
    for step in range(10**9):
        if action in agreement.step():
            return step
    raise AssertionError


# -- real processes -------------------------------------------------------------------------------

COMMON = """
import os, sys, time, signal, json
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from limpet.ranks.agreement import Agreement
from limpet.ranks.group import current_group
from limpet.errors import RankFailed
rank, size, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
"""

MAKE_STEPS = (
    COMMON
    + """
store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
agreement = Agreement(current_group(), "run", (0.01, 0.05))
value = torch.ones(1)
dist.all_reduce(value)

def refuse(*args, **kwargs):
    raise AssertionError("a collective in the step")

NAMES = ("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv")
COLLECTIVES = [n for n in dir(dist) if callable(getattr(dist, n)) and any(w in n for w in NAMES)]
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
    if step % 100 == 1:  # like gradients, but rarely, so that ranks can run ahead
        patch(False)
        dist.all_reduce(value)
        patch(True)
    if step in (1, 2500 + rank, 5000, 8000 - rank):
        agreement.propose(f"{rank}.{step}")
        proposals += 1
    began = time.perf_counter_ns()
    actions = agreement.step()
    spent.append(time.perf_counter_ns() - began)
    done += [(step, action) for action in sorted(actions)]
    time.sleep(0)
patch(False)
spent.sort()
agreement.close()
dist.barrier()
print(json.dumps({"done": done, "proposals": proposals, "median": spent[5000], "most": spent[-1]}))
dist.destroy_process_group()
"""
)

HOST_STORE = (
    COMMON
    + """
store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
print("up", flush=True)
time.sleep(600)
"""
)

LOSE_STORE = (
    COMMON
    + """
import limpet
reports = []
limpet.attach(lambda name, fields: reports.append((name, fields["wanted"])))
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
agreement = Agreement(current_group(), "run")
value, agreed = torch.ones(1), []
while not agreed:
    agreement.propose("save")
    agreed += agreement.step()
    dist.all_reduce(value)
print("agreed", flush=True)
if rank == 0:
    sys.stdin.readline()  # the test has killed the host of the store
dist.all_reduce(value)
began = time.monotonic()
raised = returned = 0
longest = 0.0
while (time.monotonic() - began < 2 or not reports) and time.monotonic() - began < 30:
    agreement.propose("later")
    before = time.monotonic()
    try:
        returned += len(agreement.step())
    except RankFailed:
        raised += 1
    longest = max(longest, time.monotonic() - before)
    time.sleep(0.001)
print(json.dumps({"raised": raised, "returned": returned, "longest": longest, "reports": reports}))
sys.stdout.flush()
os._exit(0)
"""
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """Kill the processes that a test started."""
    with ExitStack() as stack:
        yield stack


def spawn(
    cleanup: ExitStack, body: str, rank: int, port: int, **environ: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", body, str(rank), "2", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )
    cleanup.enter_context(process)
    cleanup.callback(process.kill)
    return process


def read_result(process: subprocess.Popen[str], word: str = "") -> Any:
    out, errors = process.communicate(word, timeout=120)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_two_processes_agree_in_ten_thousand_steps_without_a_collective_in_a_step(
    cleanup: ExitStack,
) -> None:
    port = free_port()
    first, second = (
        read_result(p) for p in [spawn(cleanup, MAKE_STEPS, rank, port) for rank in range(2)]
    )
    assert first["done"] == second["done"]
    actions = [action for _, action in first["done"]]
    assert len(actions) == len(set(actions)) == first["proposals"] + second["proposals"]
    print(f"a step: median {first['median']} ns, {second['median']} ns")


@pytest.mark.slow
def test_a_step_returns_or_raises_within_the_bound_if_the_host_of_the_store_is_killed(
    cleanup: ExitStack,
) -> None:
    port = free_port()
    host = spawn(cleanup, HOST_STORE, 0, port)
    assert host.stdout is not None
    host.stdout.readline()
    both = [
        spawn(cleanup, LOSE_STORE, rank, port, LIMPET_SILENT="2", LIMPET_STUCK="5")
        for rank in (0, 1)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "agreed"
    host.kill()
    host.wait()
    for result in [read_result(process, "go\n") for process in both]:
        assert result["raised"] <= 1
        assert result["longest"] < 10
        assert ["not_agreed", ["later"]] in result["reports"]
