"""Demonstrate embedding tables on servers, with workers, all of which are killed:
``make demo-tables``.

This script starts a small Ray cluster in this machine, and ``examples/embeddings.py`` on it. It
kills a worker, a server, and the driver of the training of word vectors, which must have the same
bits as an undisturbed one in one process. Then it kills a worker of a training on clicks, whose
model must be almost as good as the one that made up the clicks. The exit code is 1 if a check
fails.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import embeddings
import numpy as np
import torch
from demo_common import COMMAND, EXAMPLES, CheckFailed, CheckLog
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import limpet
from limpet import tables
from limpet.errors import LimpetError

SHOWN = "file thread string dictionary exception matrix random server optimizer polynomial"
EXPECTED = {"exception": {"raise", "raised"}, "random": {"seed", "generator"}}
MAX_AUC_DIFFERENCE = 0.01
END_SECONDS = 300.0


CLUSTER = """
import sys, ray
ray.init(num_cpus=5, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
"""A Ray cluster with five CPUs, for five servers and workers, however many this machine has."""


@contextmanager
def ray_cluster(folder: str) -> Iterator[None]:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_LOG_TO_DRIVER": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER, f"{folder}/ray"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        os.environ["RAY_ADDRESS"] = process.stdout.readline().strip() if process.stdout else ""
        if not os.environ["RAY_ADDRESS"]:
            raise CheckFailed('a Ray cluster started (pip install "limpet[ray]")')
        yield  # then its input is closed, which ends it


def find_actors(kind: str) -> list[int]:
    """Return the process ids of actors of this cluster, such as ``TableWorker``."""
    found, seen = [], [os.getpid()]
    for pid in seen:
        try:
            seen += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            if f"ray::Limpet{kind}" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:  # it has ended
            pass
    return found


class Training:
    """``embeddings.py`` in a process of its own, the driver of its servers and workers."""

    def __init__(self, log: CheckLog, model: str, run: str, *arguments: str) -> None:
        self.log, self.run = log, limpet.Run(run)
        command = [sys.executable, str(EXAMPLES / "embeddings.py"), model, "--run", run]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.began, self.lines = time.perf_counter(), list[str]()
        self._reader = Thread(target=self._read_output)
        self._reader.start()

    def _read_output(self) -> None:
        folder = str(Path(self.run.url).parent)
        for line in self.process.stdout or ():
            self.lines.append(line)
            if line.startswith("limpet:"):
                self.log.write(f"[dim]{escape(line.rstrip().replace(f'{folder}/', ''))}")

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self._reader.join()
        with self.process:  # closes its output
            pass
        if self.process.returncode > 0:
            self.log.write(escape("".join(self.lines[-20:])))

    @property
    def step(self) -> int:
        """The step of the newest version, or -1."""
        newest = self.run.latest()
        return -1 if newest is None else newest.step

    def _find(self, kind: str) -> list[int]:
        return [self.process.pid] if kind == "driver" else find_actors(f"Table{kind.title()}")

    def kill_after(self, step: int, kind: str) -> None:
        """Kill an actor, or the driver, once this step or a later one is saved."""
        end = time.perf_counter() + END_SECONDS
        while self.step < step or not (pids := self._find(kind)):
            if self.process.poll() is not None or time.perf_counter() > end:
                raise CheckFailed(f"the training saved step {step}, and has a {kind} to kill")
            time.sleep(0.05)
        os.kill(pids[-1], signal.SIGKILL)
        self.log.write(
            f"[bold red]SIGKILL[/] to the {kind} {pids[-1]}, after step {self.step} was saved"
        )

    def wait(self) -> None:
        code = self.process.wait(END_SECONDS)
        self._reader.join()
        seconds = time.perf_counter() - self.began
        self.log.check(
            code == 0,
            f"the training ended with step {self.step}, in {seconds:.0f} s",
            required=True,
        )


def on_ray(servers: int, workers: int) -> list[str]:
    return ["--engine", "ray", "--servers", str(servers), "--workers", str(workers)]


def kill_each(log: CheckLog, run: str, options: list[str], every: int) -> None:
    """Train words with 2 servers and 3 workers; kill a worker, a server, and the driver."""
    with Training(log, "words", run, *on_ray(2, 3), *options) as training:
        training.kill_after(every, "worker")
        training.kill_after(2 * every, "server")
        training.kill_after(3 * every, "driver")
        code = training.process.wait(END_SECONDS)
        log.check(code == -signal.SIGKILL, "the driver was ended by signal 9")
    until = time.monotonic() + 30
    while (left := find_actors("Table")) and time.monotonic() < until:
        time.sleep(0.05)
    log.check(not left, "its servers and workers have ended, too")


def compare(log: CheckLog, a: str, b: str) -> None:
    command = [str(COMMAND), "diff", f"{a}@latest", f"{b}@latest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in (done.stdout + done.stderr).strip().splitlines():
        log.write(escape(line.replace(f"{Path(a).parent}/", "")), 4)
    log.check(
        done.returncode == 0,
        "rows, slots, counts, and dense parameters are equal, bit for bit, and so are the queues",
    )


def show_neighbors(log: CheckLog, url: str) -> None:
    """Print the words whose vectors have the smallest angles to those of ten words."""
    text = embeddings.Text(embeddings.read_words())
    view = tables.open(url)
    vectors = torch.nn.functional.normalize(view["words"].lookup(text.vocabulary))
    vocabulary, found = [*text.counts], 0
    log.write(f"tables.open({Path(url).name!r}): {len(view['words']):,} words, step {view.step}")
    for word in SHOWN.split():
        scores = vectors @ vectors[vocabulary.index(word)]
        nearest = [vocabulary[number] for number in scores.topk(6).indices[1:].tolist()]
        log.write(f"[bold]{word:<12}[/]{', '.join(nearest)}", 4)
        found += bool({*nearest} & EXPECTED.get(word, set()))
    log.check(found == len(EXPECTED), "the vectors know that an exception is raised")


def area_under_curve(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    """Return the probability that a click has a higher score than no click."""
    ranks = scores.argsort().argsort().double()[clicks > 0]
    count, others = len(ranks), len(clicks) - len(ranks)
    return (ranks.sum().item() - count * (count - 1) / 2) / count / others


def show_days(log: CheckLog, run: str) -> None:
    """Print how many rows came and went from noon to noon: at midnight, one worker begins with the
    next day while others are still at the last one."""
    steps = embeddings.DAY_STEPS
    table = Table("day", "step", "rows", "created", "evicted", "loss", box=None, pad_edge=False)
    before = np.array([], dtype=np.int64)
    evicted = 0
    snapshots = [s for s in limpet.Run(run).snapshots() if s.step and s.step % steps]
    for day, snapshot in enumerate(snapshots):
        ids = tables.open(snapshot)["weights"].ids()
        gone = len(np.setdiff1d(before, ids))
        evicted += gone
        numbers = [day, snapshot.step, len(ids), len(np.setdiff1d(ids, before)), gone]
        table.add_row(*map(str, numbers), f"{snapshot.metrics['loss']:.4f}")
        before = ids
    log.console.print(Padding(table, (0, 0, 0, 2)))
    log.check(evicted > 0, f"{evicted} rows of ids that had vanished were evicted")


def compare_with_planted(log: CheckLog, run: str, days: int) -> None:
    ids, clicks, logits = embeddings.click_log(days - 1, seed=1)
    model = embeddings.DeepFM(tables.open(f"{run}@latest"))
    model.deep.load_state_dict(limpet.load(f"{run}@latest", keys="model/**")["model"])
    with torch.no_grad():
        learned = area_under_curve(model(ids), clicks)
    planted = area_under_curve(logits, clicks)
    log.check(
        planted - learned <= MAX_AUC_DIFFERENCE,
        f"AUC on {len(ids):,} other clicks of the last day: {learned:.4f}, at most"
        f" {MAX_AUC_DIFFERENCE} below {planted:.4f} of the planted model",
    )


def demonstrate(log: CheckLog, folder: str, quick: bool) -> None:
    alone, killed, clicks = f"{folder}/undisturbed", f"{folder}/words", f"{folder}/clicks"
    options, days = (["--quick"], 3) if quick else ([], 6)
    with log.section(
        "Undisturbed", "Word vectors by skip-gram, trained by one server and one worker."
    ):
        with Training(log, "words", alone, *options) as training:
            training.wait()
        last = limpet.Run(alone).latest().step
    with log.section(
        "Killed", "The same training with 2 servers and 3 workers, which are processes on Ray."
    ):
        kill_each(log, killed, options, last // 50 * 10)
    with log.section("Resumed", "It continues from its newest version, on 3 servers, 2 workers."):
        with Training(log, "words", killed, *on_ray(3, 2), *options) as training:
            training.wait()
        compare(log, alone, killed)
    if not quick:
        with log.section("Neighbors", "The nearest neighbors of ten words."):
            show_neighbors(log, f"{killed}@latest")
    with log.section(
        "Clicks", f"DeepFM, asynchronous, 2 servers and 3 workers; {days} days with other ids."
    ):
        with Training(log, "clicks", clicks, *on_ray(2, 3), "--days", str(days)) as training:
            training.kill_after(embeddings.DAY_STEPS, "worker")
            training.wait()
        steps = days * embeddings.DAY_STEPS
        log.check(training.step == steps, f"each mini-batch counts once: {steps:,} steps")
        show_days(log, clicks)
        compare_with_planted(log, clicks, days)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="less text, fewer days")
    options = parser.parse_args()
    log, began = CheckLog(Console(highlight=False)), time.perf_counter()
    log.console.width = min(log.console.width, 100)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="limpet-", ignore_cleanup_errors=True) as folder:
        try:
            with ray_cluster(folder):
                demonstrate(log, folder, options.quick)
        except (CheckFailed, LimpetError, subprocess.TimeoutExpired) as e:
            if str(e) not in log.failed:
                log.check(False, escape(str(e)))
    return log.finish(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
