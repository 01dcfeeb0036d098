"""An evaluation that follows the disturbed run, is killed itself, and must give the right scores.

The functions below score a version: the squared errors of all samples.
"""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import limpet
from limpet.cli.exit_codes import EVALUATION_FAILED, OTHER, STORE_FAILED
from limpet.run.run import Run
from tests.chaos.ranks import wait_until
from tests.chaos.training import Waves

ROOT = Path(__file__).parents[2]
NAME, METRIC = "chaos", "squares"
STOPPED_SECONDS = 13.0
"""Longer than the lease of the evaluator, so that another one takes over."""

THROTTLE = "2s"
"""Between two evaluations: they must leave most of the processors to the training."""

END_SECONDS = 60.0
TOLERANCE = 1e-12
"""Relative. A matrix product of a batch of another size adds in another order."""


def setup(state):
    """Return the model of ``training.make_model`` from the leaves of a version."""
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.0), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, 16),
    ).double()  # fmt: skip
    model.load_state_dict(state["model"])
    return model


def evaluate(model, batch):
    _, samples = batch
    squares = (model(samples) - samples).square()
    return {METRIC: (squares.sum(), squares.numel())}


def score_alone(url):
    """Return the score of a version from one pass over all samples in this process."""
    model = setup(limpet.load(url, keys="model/**")).eval()
    data = Waves()
    samples = torch.stack([data[index][1] for index in range(len(data))])
    with torch.no_grad():
        total, count = evaluate(model, (None, samples))[METRIC]
    return float(total) / count


class Evaluator:
    """``limpet evaluate`` with one worker, started again whenever it has ended.

    ``can_fail``: whether an event has filled the disk of the run. Then, the evaluator may have
    ended with an error, as one does whose lease was taken over while it was stopped.
    """

    def __init__(self, run, output):
        self.run, self.output = run, output
        self.can_fail = False
        self._ended: list[int] = []
        self._stopped: list[tuple[float, subprocess.Popen[bytes]]] = []
        self._process = self._start()

    def _start(self):
        module = "tests.chaos.evaluator"
        command = [sys.executable, "-m", "limpet", "evaluate"]
        command += [self.run, "--with", module]
        command += ["--data", f"{module}:Waves", "--keys", "model/**", "--workers", "1", "--follow"]
        command += ["--name", NAME, "--throttle", THROTTLE, "--metric", METRIC, "--mode", "min"]
        command += ["--batch-size", "100"]
        with self.output.open("ab") as output:
            return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def keep_running(self):
        """Start it again if it has ended, as a scheduler does. Continue those that are stopped."""
        for at, stopped in self._stopped:
            if time.monotonic() >= at + STOPPED_SECONDS:
                stopped.send_signal(signal.SIGCONT)
        if (code := self._process.poll()) is not None:
            self._ended.append(code)
            self._process = self._start()

    def disturb(self, draw):
        """Kill the evaluator or its worker, or stop the evaluator for longer than its lease."""
        workers = _children_of(self._process.pid)
        way = ("evaluator", "worker", "stopped evaluator")[draw % 3]
        if way == "worker" and workers:
            os.kill(workers[0], signal.SIGKILL)
        elif way == "stopped evaluator":
            self._process.send_signal(signal.SIGSTOP)
            self._stopped.append((time.monotonic(), self._process))
            self._process = self._start()
        else:
            self._process.kill()
            self._process.wait()
            wait_until(lambda: not any(map(_exists, workers)), 10.0, "the end of its workers")
            self._process = self._start()
        return f"{way} {self._process.pid}"

    def finish(self, flipped):
        """Wait until it has followed the training to its end. Return what is wrong."""
        for at, stopped in self._stopped:
            time.sleep(max(0.0, at + STOPPED_SECONDS - time.monotonic()))
            stopped.send_signal(signal.SIGCONT)
        try:
            for process in (self._process, *(stopped for _, stopped in self._stopped)):
                self._ended.append(process.wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            return [f"the evaluator did not end with the training\n{self._tail()}"]
        run = Run(self.run)
        allowed = {0}
        if flipped:
            allowed.add(EVALUATION_FAILED)
        if self.can_fail:
            allowed |= {STORE_FAILED, OTHER}
        if self._stopped:
            allowed.add(OTHER)
        problems = []
        if set(self._ended) - allowed:
            problems.append(f"exit codes {self._ended} of the evaluator\n{self._tail()}")
        if leases := run.catalog.leases.live():
            problems.append(f"leases remain: {leases}")
        newest = run.latest()
        versions = run.line()
        scored = [v for v in versions if self._is_done(run, v)]
        if newest is None or newest.version not in scored:
            problems.append(f"{newest} is not evaluated, but {scored}\n{self._tail()}")
        for version in scored:
            if str(version) not in flipped:
                found, expected = self._score(run, version), score_alone(run.open(version).url)
                if not math.isclose(found, expected, rel_tol=TOLERANCE):
                    problems.append(f"the score of {version} is {found}, not {expected}")
        return problems

    def kill(self):
        for process in (self._process, *(stopped for _, stopped in self._stopped)):
            process.kill()
            process.wait()

    def _is_done(self, run, version):
        status = run.evaluations(version).get(NAME)
        return status is not None and status.state == "DONE"

    def _score(self, run, version):
        return run.evaluations(version)[NAME].metrics[METRIC]

    def _tail(self):
        return self.output.read_text(errors="replace")[-3000:]


def _children_of(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def _exists(pid):
    try:
        return b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return False
