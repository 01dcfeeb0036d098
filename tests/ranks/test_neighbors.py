"""A rank whose process has ended without a last heartbeat is reported by the ranks next to it."""

import os
import signal
import subprocess
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import limpet
from limpet import machine
from limpet.errors import RankFailed
from limpet.ranks.kv import CLOSED_HEARTBEAT, Neighbors
from tests.fakegroup import FakeStore
from tests.fork_server import FORK_SERVER


class Job:
    """Rank 1 of three in this process, and its neighbors in others, which never end by themselves.
    They write nothing themselves."""

    def __init__(self):
        self.store = FakeStore()
        self.processes = {r: subprocess.Popen(["sleep", "600"]) for r in (0, 2)}
        host, boot, _ = machine.process_identity()
        for rank, process in self.processes.items():
            self.announce(rank, f"{host}\n{boot}", process.pid)
            self.store.set(f"heartbeat/{rank}", b"7 3 there 5 1")
        self.neighbors = Neighbors(1, 3)

    def announce(self, rank, host, pid):
        process = machine.pid_and_start_time(pid)
        self.store.set(f"heartbeat/{rank}/process", f"{host}\n{process}".encode())

    def kill(self, rank):
        process = self.processes[rank]
        process.kill()
        while machine.pid_and_start_time(process.pid) != f"{process.pid}:gone":
            time.sleep(0.001)  # it stays a zombie

    def report(self):
        self.neighbors.report(self.store, CLOSED_HEARTBEAT)
        return [self.store.get("heartbeat/0"), self.store.get("heartbeat/2")]


@pytest.fixture
def job():
    job = Job()
    yield job
    for process in job.processes.values():
        process.kill()
        process.wait()


ALIVE, DEAD = b"7 3 there 5 1", b"-1 0 there"


def test_a_rank_that_was_killed_is_reported_with_its_host(job):
    assert job.report() == [ALIVE, ALIVE]
    job.kill(0)
    assert job.report() == [DEAD, ALIVE]
    job.kill(2)
    assert job.report() == [DEAD, DEAD]


def test_a_heartbeat_that_was_on_its_way_does_not_bring_it_back(job):
    job.kill(2)
    job.report()
    job.store.set("heartbeat/2", b"8 3 there")
    assert job.report() == [ALIVE, DEAD]


def test_a_regular_end_stays_one(job):
    job.store.set("heartbeat/0", CLOSED_HEARTBEAT)
    job.kill(0)
    assert job.report() == [CLOSED_HEARTBEAT, ALIVE]


def test_a_process_with_the_same_id_is_another_one(job):
    host, boot, _ = machine.process_identity()
    other = f"{host}\n{boot}\n{job.processes[0].pid}:1"
    job.store.set("heartbeat/0/process", other.encode())
    assert job.report() == [DEAD, ALIVE]


@pytest.mark.parametrize("place", ["another host\nboot", "\n"])
def test_processes_of_other_hosts_are_not_looked_for(job, place):
    job.announce(0, place, job.processes[0].pid)
    job.kill(0)
    assert job.report() == [ALIVE, ALIVE]


def _run_rank(rank, port, folder):
    """Save with four ranks, of which one kills itself when it has staged its part."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    state = {"w": torch.ones(8), "mine": limpet.PerRank(rank)}
    limpet.save(folder / "first", state)

    def die(name, fields):
        if name == "staged" and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with limpet.attach(die):
        began = time.monotonic()
        try:
            limpet.save(folder / "second", state)
        except RankFailed as e:
            found = f"{time.monotonic() - began} {e}"
            (folder / f"{rank}.txt").write_text(found)
    os._exit(0)


@pytest.mark.slow
def test_a_killed_process_is_known_within_seconds(tmp_path):
    """``LIMPET_SILENT`` is 60 seconds."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = [
        FORK_SERVER.Process(target=_run_rank, args=(rank, store.port, tmp_path))
        for rank in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(50)
        process.kill()
    assert [p.exitcode for p in processes] == [0, 0, -signal.SIGKILL, 0]
    for rank in (0, 1, 3):
        seconds, _, message = (tmp_path / f"{rank}.txt").read_text().partition(" ")
        assert float(seconds) < 15
        assert "Rank 2" in message
        assert "that the process has ended" in message
