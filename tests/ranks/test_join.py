"""Plain processes form a group without torch.distributed: ``limpet.Group.join``."""

import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError

SILENT = 3

RANK = """
import json, os, signal, sys, time
import numpy as np, torch
import limpet

print("ready", flush=True)
rank, run, address = int(sys.argv[1]), sys.argv[2], sys.stdin.readline().strip()

def join(name, size):
    global address
    group = limpet.Group.join(address, rank, size, name=name)
    if address.endswith(":0"):
        print(group.address, flush=True)
    address = group.address
    return group

def part(group, value):
    rows = np.full((12 // group.size, 3), value + rank, np.float32)
    table = limpet.Boxed(rows, (len(rows) * rank, 0), (12, 3))
    return {"table": table, "dense": np.full(1000, value), "own": limpet.PerRank(rank)}

def error_of(call, *args, **options):
    began = time.monotonic()
    try:
        call(*args, **options)
    except limpet.errors.LimpetError as e:
        return [type(e).__name__, str(e), getattr(e, "rank", None), time.monotonic() - began]

report = {}
"""


class Processes:
    """Runs a script as each rank of a group. Rank 0 tells the others its address."""

    def __init__(self, folder):
        self.run = folder / "run"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, script, count, stuck):
        command = [sys.executable, "-c", RANK + script + "\nprint(json.dumps(report))"]
        limits = {"LIMPET_SILENT": str(SILENT), "LIMPET_STUCK": str(stuck)}
        for rank in range(count):
            self.processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(self.run)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **limits, "OMP_NUM_THREADS": "1"},
                )
            )
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        assert lines == ["ready\n"] * count
        address = "127.0.0.1:0\n"
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(address)
            process.stdin.flush()
            if process is self.processes[0]:
                address = process.stdout.readline()

    def reports(self, killed=-1):
        """Return what each rank printed at its end, which must be regular unless ``killed``."""
        outputs = [process.communicate(timeout=60)[0] for process in self.processes]
        codes = [process.returncode for process in self.processes]
        assert codes == [-9 if rank == killed else 0 for rank in range(len(codes))]
        return [json.loads(out or "{}") for out in outputs]


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    for process in processes.processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_processes_save_load_lose_a_rank_join_again_and_miss_a_rank(processes):
    script = """
with join("three", 3) as group:
    saved = limpet.save(f"{run}/version_1", part(group, 10), group=group)
    report["first"] = [group.rank, group.size, saved.step]
    with limpet.Run(run).writer(keep=limpet.KeepLast(2), group=group) as writer:
        for step in (2, 3):
            writer.save(part(group, 10 * step), step=step)
    report["closed"] = error_of(group.close)
report["closed"] = error_of(limpet.save, f"{run}/version_9", part(group, 0), group=group)
if rank < 2:
    with join("two", 2) as group:
        state = {"table": limpet.Boxed(np.zeros((6, 3), np.float32), (6 * rank, 0), (12, 3))}
        limpet.load(f"{run}/version_3", state, keys="table", group=group)
        report["loaded"] = state["table"].tensor[:, 0].tolist()
group = join("again three", 3)
limpet.save(f"{run}/version_4", part(group, 40), group=group)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
report["lost"] = error_of(limpet.save, f"{run}/version_5", part(group, 50), group=group)
group.close()
with join("the two that are left", 2) as group:
    with limpet.Checkpointer(run, part(group, 60), save=limpet.EverySteps(1), group=group) as ckpt:
        report["resumed"] = ckpt.resume().step
        ckpt.step()
    if rank:  # reads the last values when rank 0, which serves them, has nothing left to do
        from limpet.ranks.kv import KVClient
        try_get = KVClient.try_get
        KVClient.try_get = lambda *args, **options: time.sleep(0.3) or try_get(*args, **options)
    limpet.load(f"{run}/version_5", part(group, 0), group=group)
os.environ["LIMPET_STUCK"] = "3"
group = join("three of which one does not join", 3)
report["missing"] = error_of(limpet.save, f"{run}/version_9", part(group, 0), group=group)
"""
    processes.start(script, 3, stuck=30)
    reports = processes.reports(killed=2)
    for rank, report in enumerate(reports[:2]):
        assert report["first"] == [rank, 3, 1]
        assert report["closed"][0] == "RankFailed"
        assert "Group.close" in report["closed"][1]
        assert report["loaded"] == [30.0] * 4 + [31.0] * 2 if rank == 0 else [31.0] * 2 + [32.0] * 4
        name, text, lost, seconds = report["lost"]
        assert (name, lost, "version_5" in text) == ("RankFailed", 2, True)
        assert report["resumed"] == 4
        assert seconds < 20
        name, text, missing, seconds = report["missing"]
        assert (name, missing) == ("RankFailed", 2)
        assert "Rank 2 did not join the save of" in text
        assert "that the rank never joined" in text
        assert 2 < seconds < 20
    run = limpet.Run(processes.run)
    assert [version.step for version in run.snapshots()] == [2, 3, 4, 5]
    for step, ranks in ((3, 3), (5, 2)):
        snapshot = limpet.open(f"{processes.run}/version_{step}")
        assert snapshot.verify().ok
        state = limpet.load(snapshot.url)
        value = 30 if step == 3 else 40  # that of the last version, from which the last two resume
        rows = np.repeat(value + np.arange(3), 4)
        assert state["table"][:, 0].tolist() == rows.tolist()
        assert state["dense"].tolist() == [value] * 1000
        assert state["own"] == {str(rank): rank for rank in range(ranks)}


def test_a_name_is_used_once_by_each_rank_and_with_one_size(tmp_path):
    with limpet.Group.join("127.0.0.1:0", 0, 1) as group:
        assert group.address.startswith("127.0.0.1:")
        assert not group.address.endswith(":0")
        limpet.save(tmp_path / "version_1", {"x": np.arange(3)}, group=group)
    address = group.address
    with pytest.raises(LimpetError, match=r"Rank 0 has joined this group before.*new name="):
        limpet.Group.join(address, 0, 1)
    with limpet.Group.join(address, 0, 2, name="next"):
        with pytest.raises(LimpetError, match=r"size must be 2, .*; found 3"):
            limpet.Group.join(address, 1, 3, name="next")
        with limpet.Group.join(address, 1, 2, name="next") as other:
            assert (other.rank, other.size, other.address) == (1, 2, address)


def test_an_address_that_nobody_serves_is_an_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("LIMPET_STUCK", "0.2")
        monkeypatch.setenv("LIMPET_SILENT", "0.2")
        began = time.monotonic()
        with pytest.raises(limpet.errors.RankFailed, match="Rank 0 does not serve the group") as e:
            limpet.Group.join(address, 1, 2)
        assert e.value.rank == 0
        assert time.monotonic() - began < 10
        taken.listen()
        with pytest.raises(LimpetError, match=f"Rank 0 cannot serve {address}"):
            limpet.Group.join(address, 0, 2)


@pytest.mark.parametrize(
    ("address", "rank", "size", "message"),
    [
        ("127.0.0.1", 0, 2, "address must be"),
        (29500, 0, 2, "address must be"),
        (":29500", 0, 2, "address must be"),
        ("127.0.0.1:65536", 0, 2, "address must be"),
        ("127.0.0.1:0", 1, 2, "Only rank 0"),
        ("127.0.0.1:0", 2, 2, "rank must be"),
        ("127.0.0.1:0", -1, 2, "rank must be"),
        ("127.0.0.1:0", True, 2, "rank must be"),
        ("127.0.0.1:0", 0, 2.0, "rank must be"),
    ],
)
def test_arguments_are_checked_first(address, rank, size, message):
    with pytest.raises(LimpetError, match=message):
        limpet.Group.join(address, rank, size)
