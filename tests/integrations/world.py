"""Four processes that stay: each test sends them a function, and all of them call it.

PyTorch's own base classes start processes for every test, seconds each, and need ``expecttest``.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZE = 4
SECONDS = 120.0


def run_rank(rank: int, rendezvous_file: str, pipe: Connection) -> None:
    """The life of one process: calls what it is sent, and answers with the result."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class RankProcesses:
    """The processes, started when first needed and anew after a test that failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.number = 0

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.number += 1
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            meet = str(self.folder / f"meet-{self.number}")
            process = context.Process(target=run_rank, args=(rank, meet, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function, of a module, returns on each rank. Fails as the first rank did."""
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            told = pipe.recv() if pipe.poll(SECONDS) else (False, "no answer in time")
            answers.append((rank, *told))
        failed = [f"rank {rank}: {value}" for rank, good, value in answers if not good]
        if failed:
            self.stop()
            raise AssertionError("\n".join(failed))
        return [value for _, _, value in answers]

    def stop(self, seconds: float = 0) -> None:
        """End the processes. In ``seconds`` they may end by themselves, with their own children."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(seconds)
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
