"""Four rank processes that serve many tests. Each test sends them a function that all of them call.

PyTorch's own base classes start new processes for every test, which takes seconds, and they need
``expecttest``.
"""

import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.fork_server import FORK_SERVER

SIZE = 4
TIMEOUT = 120.0
"""Time limit, in seconds, for one call on all ranks."""


def run_rank(rank, rendezvous_file, pipe):
    """Run one rank: call each function that arrives and send back its result."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=TIMEOUT / 2),
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
    """The rank processes. They start on the first call, and again after a call that failed."""

    def __init__(self, folder):
        self.folder = folder
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.number = 0

    def start(self):
        self.number += 1
        for rank in range(SIZE):
            parent_end, child_end = FORK_SERVER.Pipe()
            rendezvous_file = str(self.folder / f"rendezvous-{self.number}")
            process = FORK_SERVER.Process(target=run_rank, args=(rank, rendezvous_file, child_end))
            process.start()
            child_end.close()
            self.pipes.append(parent_end)
            self.processes.append(process)

    def run(self, function, *args):
        """Call ``function`` on every rank, and return the result of each rank.

        ``function`` must be at the top level of a module. If it fails on any rank, the processes
        end, and an ``AssertionError`` contains the traceback of each failed rank.
        """
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))
        replies = []
        for rank, pipe in enumerate(self.pipes):
            reply = pipe.recv() if pipe.poll(TIMEOUT) else (False, f"no reply within {TIMEOUT:g} s")
            replies.append((rank, *reply))
        failed = [f"rank {rank}: {value}" for rank, ok, value in replies if not ok]
        if failed:
            self.stop()
            raise AssertionError("\n".join(failed))
        return [value for _, _, value in replies]

    def stop(self, seconds=0):
        """Wait up to ``seconds`` for each process to end with its children, then kill it."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(seconds)
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
