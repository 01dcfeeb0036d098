"""The processes of one start of the training, and what they have written so far."""

import json
import os
import re
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from tests.chaos import training
from tests.chaos.training import BATCH
from tests.fork_server import FORK_SERVER

POLL_SECONDS = 0.01


class Hang(Exception):
    """Something did not happen within its limit. The message says what."""


def wait_until(condition, seconds, what):
    """Poll until a condition holds. Raises ``Hang``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Hang(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_SECONDS)


class Ranks:
    """The ranks of one start. They run from the constructor on, until ``end`` or by themselves."""

    def __init__(self, start):
        self.start = start
        self.began = time.monotonic()
        self._processes: list[BaseProcess] = []
        self._stopped: set[int] = set()
        self._store = start.host_store() if start.has_launcher_store else None
        for rank in range(start.size):
            process = FORK_SERVER.Process(target=training.run_rank, args=(start, rank))
            process.start()
            self._processes.append(process)

    def pid(self, rank):
        return self._processes[rank].pid or 0

    def send(self, rank, number):
        """Send a signal to a rank, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)
        if number == signal.SIGSTOP:
            self._stopped.add(rank)
        elif number == signal.SIGCONT:
            self._stopped.discard(rank)

    @property
    def alive(self):
        return [r for r, p in enumerate(self._processes) if p.is_alive()]

    @property
    def codes(self):
        """The exit code of each rank; -9 after SIGKILL, None while it runs."""
        return [p.exitcode for p in self._processes]

    @property
    def has_failed(self):
        """True if a rank has ended with a code that torchrun counts as a failure."""
        return any(code not in (None, 0, 75, 76) for code in self.codes)

    def end(self, grace):
        """End what is left as torchrun does: SIGTERM, and SIGKILL after a grace period.

        Return the ranks that SIGKILL had to end though nothing had stopped them.
        """
        for rank in self.alive:
            self.send(rank, signal.SIGTERM)
        waited = [r for r in self.alive if r not in self._stopped]
        end = time.monotonic() + grace
        while {*waited} & {*self.alive} and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        late = sorted({*waited} & {*self.alive})
        self.kill()
        return late

    def kill(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._store = None

    # -- what they have written --------------------------------------------------------------------

    def log(self, rank):
        path = Path(self.start.folder, f"rank-{rank}.log")
        return (
            [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        )

    def entries(self, name):
        """The first entry with a name of each rank, or None."""
        found = []
        for rank in range(self.start.size):
            found.append(next((e for e in self.log(rank) if e["name"] == name), None))
        return found

    def all_at(self, name):
        """The time at which the last rank wrote an entry, or None if one has not done so."""
        times = [None if e is None else float(e["at"]) for e in self.entries(name)]
        return None if None in times else max(t for t in times if t is not None)

    def steps(self, rank):
        """A row for each step: its number, the time in nanoseconds, and the samples of the rank."""
        path = Path(self.start.folder, f"rank-{rank}.steps")
        width = 2 + BATCH // self.start.size
        data = path.read_bytes() if path.exists() else b""
        return np.frombuffer(data[: len(data) // (8 * width) * 8 * width], np.int64).reshape(
            -1, width
        )

    @property
    def last_step(self):
        """The last step that is complete on all ranks of this start, or 0."""
        lasts = [int(rows[-1, 0]) if len(rows) else 0 for rows in map(self.steps, self._all)]
        return min(lasts)

    @property
    def step_count(self):
        """The number of steps that are complete on all ranks of this start."""
        return min(len(self.steps(rank)) for rank in self._all)

    @property
    def _all(self):
        return range(self.start.size)

    def describe(self):
        """The codes and the last output of each rank, to find out why it failed."""
        parts = [f"start {self.start.folder}, codes {self.codes}"]
        for rank in self._all:
            path = Path(self.start.folder, f"rank-{rank}.output")
            text = path.read_text(errors="replace") if path.exists() else ""
            output = re.sub(r"(?m)^frame #.*\n", "", text)[-1500:]  # stacks of C++
            names = [e["name"] for e in self.log(rank)][-6:]
            parts.append(f"-- rank {rank}, log {names}\n{output}")
        return "\n".join(parts)
