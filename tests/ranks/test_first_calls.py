"""Ranks that die, stop, end, or are late before or after their first call, as real processes."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

import limpet
from limpet.errors import RankFailed
from tests.ranks.world import TIMEOUT, run_ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SILENT, STUCK = 2, 8


class Rank:
    """One of three ranks. ``report`` says what its last call did, and after how many seconds."""

    def __init__(self, rank, store, folder):
        self.rank, self.store, self.folder = rank, store, folder
        self.report: dict[str, Any] = {}

    def create(self):
        """Make the first call, which sends the first heartbeat."""
        state = {"w": np.zeros(3), "rank": limpet.PerRank(self.rank)}
        policy = limpet.EverySteps(1)
        return limpet.Checkpointer(self.folder / "run", state, save=policy)

    def resume(self, ckpt=None):
        ckpt = self.create() if ckpt is None else ckpt
        began = time.monotonic()
        try:
            ckpt.resume()
            self.report = {"error": "", "failed": -1}
        except RankFailed as e:
            self.report = {"error": str(e), "failed": e.rank}
        self.report["seconds"] = time.monotonic() - began

    def signal(self, name):
        self.store.add(name, 1)

    def await_signal(self, name, count=1):
        wait_until(lambda: self.store.add(name, 0) >= count, 60)

    def stop_until(self, name):
        """Stop this process until there are two signals of this name."""
        pid = os.getpid()
        if os.fork() == 0:
            store = dist.TCPStore("127.0.0.1", self.store.port, None, False, TIMEOUT)
            while store.add(name, 0) < 2:
                time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)


Plan = Callable[[Rank], None]


def die(rank):
    rank.signal("begun")
    os.kill(os.getpid(), signal.SIGKILL)


def create_and_die(rank):
    rank.create()
    rank.signal("begun")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def create_and_end(rank):
    rank.create()
    rank.signal("begun")
    time.sleep(0.5)


def resume_later(rank):
    """Load data for longer than SILENT before the first call."""
    rank.signal("begun")
    time.sleep(1.5 * SILENT)
    rank.resume()


def create_and_resume_later(rank):
    ckpt = rank.create()
    rank.signal("begun")
    time.sleep(1.5 * SILENT)
    rank.resume(ckpt)


def await_victim(rank):
    """Wait until the victim has died, ended, or stopped. Its connection may take seconds."""
    rank.await_signal("begun")
    time.sleep(1.0)


def wait_and_resume(rank):
    """End after the other one has its result: it may join late, and then blame this rank."""
    await_victim(rank)
    rank.resume()
    rank.signal("resumed")
    rank.await_signal("resumed", 2)


def stop_first(rank):
    """Stop before the first call, until the others have given up."""
    rank.signal("begun")
    rank.stop_until("gave up")
    rank.resume()


def create_and_stop(rank):
    ckpt = rank.create()
    rank.signal("begun")
    time.sleep(0.5)
    rank.stop_until("gave up")
    rank.resume(ckpt)


def give_up_and_end(rank):
    await_victim(rank)
    rank.resume()
    dist.destroy_process_group()  # as at the end of the process, which here calls os._exit
    rank.signal("gave up")


def give_up_and_stay(rank):
    await_victim(rank)
    rank.resume()
    rank.signal("gave up")
    rank.await_signal("done")


def run_plan(plans, others, rank, port, folder):
    os.environ["LIMPET_STUCK"] = str(STUCK)
    store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    group_store = dist.PrefixStore("group", store.clone())
    dist.init_process_group("gloo", None, TIMEOUT, 3, rank, group_store)
    this = Rank(rank, store, folder)
    this.signal("initialized")
    this.await_signal("initialized", 3)
    plans.get(rank, others)(this)
    if rank in plans:
        this.signal("done")
    (folder / f"{rank}.json").write_text(json.dumps(this.report))
    if dist.is_initialized():
        dist.destroy_process_group()


class Case(NamedTuple):
    """The plan of rank ``victim``, and that of the two others.

    ``expected``: the text and the longest duration of the others' errors; ``victim_waits``: the
    longest duration of the victim's own error, or None if it must succeed or report nothing.
    """

    victim: int
    plan: Plan
    others: Plan
    expected: str
    others_wait: float
    victim_waits: float | None = None


CASES = [
    *(Case(r, create_and_die, wait_and_resume, f"within {SILENT} s", 2.5 * SILENT) for r in (0, 2)),
    Case(0, create_and_end, wait_and_resume, "process has ended", 1.5 * SILENT),
    # nothing tells such a rank from one that still imports or loads data
    Case(2, die, wait_and_resume, f"within {STUCK} s", STUCK + 2 * SILENT),
    Case(0, resume_later, wait_and_resume, "", STUCK),
    Case(2, create_and_resume_later, wait_and_resume, "", STUCK),
    *(
        Case(r, stop_first, plan, f"within {STUCK} s", STUCK + 2 * SILENT, 2 * SILENT)
        for r, plan in ((0, give_up_and_end), (2, give_up_and_stay))
    ),
    *(
        Case(r, create_and_stop, plan, f"within {SILENT} s", 2.5 * SILENT, 2 * SILENT)
        for r, plan in ((2, give_up_and_end), (0, give_up_and_stay))
    ),
]


def problems_of(case, folder):
    """Run a case. Return what is wrong, or an empty string."""
    folder.mkdir()
    victim = case.victim
    (folder / f"{victim}.json").write_text("{}")
    is_killed = case.plan in (die, create_and_die)
    reports = run_ranks(
        partial(run_plan, {victim: case.plan}, case.others),
        folder,
        tuple(-signal.SIGKILL if is_killed and r == victim else 0 for r in range(3)),
        silent_seconds=SILENT,
        timeout=60,
    )
    others = [report for r, report in enumerate(reports) if r != victim]
    is_right = all(
        report["failed"] == (victim if case.expected else -1)
        and case.expected in report["error"]
        and report["seconds"] < case.others_wait
        for report in others
    )
    if case.plan is die:
        is_right &= all(report["seconds"] > STUCK - 1 for report in others)
    if case.victim_waits is not None:
        report = reports[victim]
        is_right &= bool(report["error"]) and report["seconds"] < case.victim_waits
    elif not case.expected:
        is_right &= reports[victim]["error"] == ""
    names = f"rank {victim} {case.plan.__name__}, others {case.others.__name__}"
    return "" if is_right else f"{names}: {reports}"


def test_ranks_that_die_stop_end_or_are_late(tmp_path):
    """A rank is known to be dead after SILENT from its first call on, and after STUCK before."""
    with ThreadPoolExecutor(5) as pool:
        folders = [tmp_path / str(n) for n in range(len(CASES))]
        problems = [text for text in pool.map(problems_of, CASES, folders) if text]
    assert not problems, "\n".join(problems)
