"""Processes of a training over gloo that get real signals."""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import limpet
from limpet.errors import Preempted
from limpet.preemption import Preemption, PreemptionGuard, SignalNotice
from limpet.run.policy import EverySteps
from tests.fork_server import FORK_SERVER

TIMEOUT = timedelta(seconds=60)
ITEMS = 2**16


class Items(Dataset[torch.Tensor]):
    """The numbers from 0."""

    def __len__(self):
        return ITEMS

    def __getitem__(self, number):
        return torch.full((3,), number / ITEMS)


class World:
    """The processes of one start of a job. The test hosts the store, as torchrun's agent does.

    ``lives``: the number of process groups that follow one another. All ranks leave each of them
    but the last after a notice of the test. In life N, the process of rank N ends then, and the
    test starts another one. The others join the next group. ``options``: see ``train``.
    """

    def __init__(self, size, folder, lives=1, **options):
        self.size, self.folder, self._lives, self._options = size, folder, lives, options
        self.processes: list[Any] = []

    def __enter__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
        for path in self.folder.glob("*.step"):
            path.unlink()
        for rank in range(self.size):
            self.processes.append(self._start(rank, range(self._lives)))
            time.sleep(self._options.get("apart", 0.0))
        return self

    def _start(self, rank, lives):
        args = (rank, self.size, self.store.port, self.folder, lives, self._options)
        process = FORK_SERVER.Process(target=_run_rank, args=args)
        process.start()
        return process

    def restart(self, rank, life):
        """Start a process in place of one that has ended."""
        self.processes[rank] = self._start(rank, range(life, self._lives))

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def wait_for_step(self, step, life=0):
        """Wait until every rank has made ``step`` steps in all, the last one in this life."""
        end = time.monotonic() + 60
        while any(self._step_of(rank, life) < step for rank in range(self.size)):
            assert time.monotonic() < end, self.logs()
            assert all(p.exitcode is None for p in self.processes), self.logs()
            time.sleep(0.005)

    def newest_step(self, life):
        """Return the last step that a rank has made in a life."""
        return max(self._step_of(rank, life) for rank in range(self.size))

    def _step_of(self, rank, life):
        path = self.folder / f"{rank}-{life}.step"
        return int(path.read_text() or -1) if path.exists() else -1

    def send(self, rank, number, group=False):
        """Send a signal to a rank, or to it and its data-loader workers."""
        (os.killpg if group else os.kill)(self.processes[rank].pid, number)

    def codes(self, ranks=None, timeout=60):
        """Wait for the ends of processes, and return their exit codes."""
        chosen = [self.processes[r] for r in (range(self.size) if ranks is None else ranks)]
        end = time.monotonic() + timeout
        for process in chosen:
            process.join(max(0.0, end - time.monotonic()))
        assert all(p.exitcode is not None for p in chosen), self.logs()
        return [p.exitcode for p in chosen]

    def results(self):
        """Return what the ranks wrote at their ends."""
        return [json.loads((self.folder / f"{r}.json").read_text()) for r in range(self.size)]

    def logs(self):
        return "\n".join(p.read_text()[-1500:] for p in sorted(self.folder.glob("*.log")))


def _run_rank(rank, size, port, folder, lives, options):
    os.setpgrp()
    with (folder / f"{rank}.log").open("a") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    store = dist.TCPStore("127.0.0.1", port, size, False, TIMEOUT)
    for life in lives:
        own = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", None, TIMEOUT, size, rank, own)
        try:
            train(rank, folder, result, life=life, is_last=life == lives[-1], **options)
        except BaseException as e:
            result["error"] = [type(e).__name__, str(e)]
            if life in (rank, lives[-1]) or not isinstance(e, Preempted):
                raise
        finally:
            (folder / f"{rank}.json").write_text(json.dumps(result))
        if life != lives[-1]:
            dist.destroy_process_group()


class Training:
    """A data-parallel training without a wrapper: it averages the gradients by itself."""

    def __init__(self, workers=0):
        torch.manual_seed(5)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = limpet.DataLoader(
            Items(),
            total_batch_size=8,
            shuffle=True,
            seed=1,
            num_workers=workers,
            # the default of Linux, but not in a process of a fork server
            multiprocessing_context="fork" if workers else None,
        )
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": limpet.Progress(),
            "loader": self.loader,
        }

    def step(self, inputs):
        loss = (self.model(inputs) - 1).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()


def train(
    rank,
    folder,
    result,
    *,
    life=0,
    is_last=True,
    last_step=10**6,
    last_steps=None,
    grace=None,
    seconds=None,
    workers=0,
    fail_at=None,
    every=10**9,
    evaluate_at=None,
    apart=0.0,
):
    """Train up to ``last_step``, and compare the parameters with those of an undisturbed training.

    Args:
        life: The number of process groups before this one. ``is_last``: There is none after it.
        last_steps: Instead of ``last_step``, the number of steps after the last resume.
        seconds: The time from SIGTERM until the process is killed.
        workers: The number of data-loader workers.
        fail_at: The rank and the step of a ``ValueError``.
        every: The steps from save to save.
        evaluate_at: The step after which the rank evaluates for 1 s.
        apart: The seconds from the start of a rank to that of the next one.
    """
    training = Training(workers)
    preemption = Preemption(grace=grace, notices=[SignalNotice(seconds=seconds)])
    with limpet.Checkpointer(
        folder / "run", training.state, save=EverySteps(every), preemption=preemption
    ) as ckpt:
        ckpt.resume()
        guard = PreemptionGuard(ckpt)
        result["resumed"] = ckpt.current_step
        result.setdefault("lives", {})[str(life)] = ckpt.current_step
        if last_steps is not None:
            last_step = ckpt.current_step + (last_steps if is_last else 10**6)

        def step(inputs):
            if fail_at == (rank, ckpt.current_step + 1):
                raise ValueError(f"bad batch on rank {rank}")
            training.step(inputs)
            time.sleep(0.002)

        for inputs in training.loader:
            guard.run(step, inputs)
            (folder / f"{rank}-{life}.step").write_text(str(ckpt.current_step))
            if ckpt.current_step == evaluate_at:
                time.sleep(1)
            if ckpt.current_step >= last_step:
                break
        result["calls"] = guard.total_run_calls
    undisturbed = Training()
    for _, inputs in zip(range(last_step), undisturbed.loader):
        undisturbed.step(inputs)
    pairs = zip(training.model.parameters(), undisturbed.model.parameters(), strict=True)
    result["is_equal"] = all(torch.equal(a, b) for a, b in pairs)
