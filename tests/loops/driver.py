"""Runs the trainings of a case in processes that this one forks, and compares their records."""

import gc
import os
import signal
import sys
import time
from multiprocessing import set_start_method
from pathlib import Path

import torch
import torch.distributed as dist

import limpet
from tests.fork_server import FORK_SERVER
from tests.forks import describe, fork, wait
from tests.loops.datasets import LENGTH
from tests.loops.training import Case, Interrupted, run_training

LIMIT = 120.0
"""Seconds for one process."""

RAISED = 3
"""The exit code of a process that an exception has ended."""


def check_in_process(case: Case, folder: Path, steps: slice | None = None):
    """Check a case in a process of its own. Raises ``AssertionError`` with all that it reports."""
    output = folder / "output"
    process = FORK_SERVER.Process(target=_check_logged, args=(case, str(folder), steps))
    process.start()
    process.join(600)
    process.kill()
    process.join()
    assert process.exitcode == 0, output.read_text()[-6000:]


def _check_logged(case, folder, steps):
    with open(f"{folder}/output", "w") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    os.environ["LIMPET_SILENT"] = "30"
    torch.set_num_threads(1)
    # in a process of a fork server, each loader would start a fork server of its own, which imports
    # PyTorch, and outlives a training that is killed
    set_start_method("fork", force=True)
    for name in limpet.__all__:
        getattr(limpet, name)  # imports it before the forks
    gc.collect()
    gc.freeze()  # a search for garbage would read, and so copy, all pages
    check(case, Path(folder), steps)


def check(case: Case, folder: Path, steps: slice | None = None):
    """Compare a training that is killed several times with one that is not, and then start it
    again, although it has ended. ``steps``: of all steps and validations, those in which it is
    killed, instead of the kills of the case."""
    whole = Trainings(case, folder / "whole")
    records = whole.run(None, "whole")[0]
    kills = case.kills
    if steps is not None:
        kinds = ("step",) if case.validation == "none" else ("step", "validation")
        kills = [" ".join(r.split()[:2]) for r in records if r.startswith(kinds)][steps]
    killed = Trainings(case, folder / "killed")
    for kill in kills:
        killed.run(kill, f"killed at {kill}")
    killed.run(None, "the rest")
    again = killed.run(None, "again, after its end")
    for rank, lines in enumerate(again):
        assert [line.split()[0] for line in lines] == ["end"], f"rank {rank}: {lines}"
    if isinstance(case.ranks, tuple):
        compare_samples(whole.folder, killed.folder)
        return
    for rank in range(case.ranks):
        expected, at = whole.logs[0][rank], 0
        for kill, log in zip([None, *kills, "", ""], killed.logs):
            at = compare(expected, at, log[rank], kill, case.lost)
        assert at == len(expected), f"rank {rank} ended at record {at} of {len(expected)}"
    compare_states(whole.folder, killed.folder)


def compare(whole, at, log, kill, lost):
    """Check that a process has repeated the records of the uninterrupted training from ``at`` on,
    or from up to ``lost`` records before. Return where it ended."""
    if log and log[0].split()[0] == "end":
        at = len(whole) - 1
    elif kill is not None and kill.startswith(("step", "save")):
        while whole[at].startswith("inside"):  # it followed the save of the step
            at += 1
    first = whole.index(log[0]) if log and log[0] in whole else at
    if kill is not None and kill.startswith("save"):
        lost += 1
    context = f"after kill {kill}"
    for number, line in enumerate(log):
        expected = whole[first + number] if first + number < len(whole) else None
        assert line == expected, f"{context}, record {first + number}:\n{line}\n{expected}"
    assert at - lost <= first <= at, f"{context}: begins with record {first}, not {at}: {log[:1]}"
    return first + len(log)


def compare_states(whole, killed):
    """Compare the last versions: every value and every byte."""
    first, second = (limpet.load(f"{folder}@latest") for folder in (whole, killed))
    first, second = (dict(describe(state, "")) for state in (first, second))
    keys = first.keys() | second.keys()
    differing = {k: (first.get(k), second.get(k)) for k in keys if first.get(k) != second.get(k)}
    assert not differing, f"the last versions differ: {differing}"
    first, second = (limpet.Run(str(folder)) for folder in (whole, killed))
    assert first.latest().step == second.latest().step
    assert first.metrics(first.latest().step) == second.metrics(second.latest().step)


def compare_samples(whole, killed):
    """Compare what all ranks together have seen in each step."""
    first, second = (
        {
            step: sorted(
                line for p in folder.glob(f"samples-{step}-*") for line in p.read_text().split("\n")
            )
            for step in range(1, 100)
        }
        for folder in (whole, killed)
    )
    assert first == second
    assert len([step for step in first if first[step]]) > 6


class Trainings:
    """The processes of one training, one after the other. ``logs``: of each, those of its ranks."""

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        self.logs: list[list[list[str]]] = []
        folder.mkdir()
        if "growing" in case.data:
            (folder / "length").write_text(f"{LENGTH}")

    def run(self, kill, name):
        number, case = len(self.logs), self.case
        ranks, workers = (
            value if isinstance(value, int) else value[number % len(value)]
            for value in (case.ranks, case.workers)
        )
        for path in self.folder.glob("port*"):
            path.unlink()
        logs = [self.folder / f"log-{number}-{rank}" for rank in range(ranks)]
        began = time.monotonic()
        pids = [
            fork(lambda rank=rank: self._train(rank, ranks, logs[rank], kill, workers))
            for rank in range(ranks)
        ]
        codes = []
        for pid in reversed(pids):  # the last rank is the one that is killed
            codes.append(wait(pid, began + LIMIT))
            if codes == [-signal.SIGKILL]:
                for other in pids[:-1]:
                    os.kill(other, signal.SIGKILL)
        expected = {"!": RAISED, "~": 75}.get(kill[-1], -signal.SIGKILL) if kill else 0
        assert codes == [expected] * ranks, f"{name}: the processes ended with {codes}"
        self.logs.append([log.read_text().splitlines() for log in logs])
        print(f"{name}: {time.monotonic() - began:.2f} s")
        return self.logs[-1]

    def _train(self, rank, ranks, log, kill, workers):
        if ranks > 1:
            join(rank, ranks, self.folder)
        try:
            run_training(self.case, str(self.folder), log, (rank, ranks), kill, workers)
        except Interrupted:
            sys.exit(RAISED)
        if ranks > 1:
            dist.barrier()


def join(rank, ranks, folder):
    """Form a group. Rank 0 has the store, and writes its port to a file."""
    path = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
        (folder / "port.new").write_text(f"{store.port}")
        (folder / "port.new").rename(path)
    else:
        end = time.monotonic() + LIMIT
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(path.read_text()), ranks, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
