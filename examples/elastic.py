"""Demonstrate a training that changes its number of ranks: ``make demo-elastic``.

This script runs ``examples/fsdp.py`` without interruption on 4 ranks. Then it runs it again on 4,
2, 3, and 1 ranks, and stops it in a different way each time. Both runs must have the same losses,
except for differences from the order of additions. The exit code is 1 if a check fails.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_common import EXAMPLES, CheckFailed, CheckLog
from rich.console import Console
from rich.table import Table

import limpet

COMMIT_SECONDS = 60.0
"""Maximum time that the commit of a version may take after its step, on a slow store."""

TOLERANCE = 1e-4
"""Maximum allowed difference of two losses. Sums of float32 depend on the order of addition, which
causes differences of about 1e-6 here. A batch that is used twice, or an optimizer without its
state, causes differences of at least 1e-2, and of 1e-1 at most steps."""

BATCH = 24
"""Windows per batch, over all ranks."""

LOSS_LINE = re.compile(r"step +(\d+)  loss (\S+)")
Curve = dict[int, float]


@dataclass(frozen=True)
class TrainingSize:
    """The number of epochs, the steps of an epoch and between saves, and where the second training
    is stopped: at a step, after an epoch, and at a step."""

    epochs: int = 5
    epoch: int = 16
    every: int = 10
    stops: tuple[int, int, int] = (27, 3, 63)

    @property
    def steps(self) -> int:
        return self.epochs * self.epoch

    def last_save(self, step: int) -> int:
        """Return the last step that is saved, up to ``step``."""
        return step // self.every * self.every


QUICK = TrainingSize(epochs=4, epoch=6, every=4, stops=(7, 2, 18))


def train_on_ranks(
    count: int, run: str, size: TrainingSize, *, epochs: int = 0, kill_at: int = 0
) -> Iterator[str]:
    """Train on ``count`` ranks, and yield the lines that rank 0 prints.

    ``epochs``: how many (0: those of ``size``). ``kill_at``: the step at which one rank is
    killed and torchrun stops the others (0: none). On a slow store, the kill waits until the last
    version before this step, which is saved in the background, is committed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += [str(EXAMPLES / "fsdp.py"), run, "--every", str(size.every)]
    command += ["--epochs", str(epochs or size.epochs), "--batch", str(BATCH)]
    command += ["--windows", str(size.epoch * BATCH)]
    versions = limpet.Run(run)
    versions.latest()  # the first call imports and connects, for which training would not wait
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                yield line.rstrip()
                match = LOSS_LINE.match(line)
                if match and int(match[1]) == kill_at:
                    wait_for_version(versions, size.last_save(kill_at))
                    os.kill(last_rank_process(process.pid), signal.SIGKILL)
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if not kill_at and code:
        raise CheckFailed(f"{count} ranks exited with code {code}")


def wait_for_version(run: limpet.Run, step: int) -> None:
    """Wait until the version of a step, or a later one, is committed. Raises ``CheckFailed``."""
    end = time.monotonic() + COMMIT_SECONDS
    while (newest := run.latest()) is None or newest.step < step:
        if time.monotonic() > end:
            raise CheckFailed(f"version_{step} was not committed within {COMMIT_SECONDS:g} s")
        time.sleep(0.01)


def last_rank_process(launcher: int) -> int:
    """Return the process id of the last rank that torchrun started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return int(children[-1])


def read_losses(log: CheckLog, lines: Iterator[str]) -> Curve:
    """Return the losses of a training by step, and print its other lines and a summary."""
    curve: Curve = {}
    for line in lines:
        if match := LOSS_LINE.match(line):
            curve[int(match[1])] = float(match[2])
        else:
            log.write(line)
    if curve:
        first, last = min(curve), max(curve)
        log.write(f"steps {first} to {last}, loss {curve[first]:.4f} to {curve[last]:.4f}")
    return curve


def compare_curves(log: CheckLog, size: TrainingSize, uninterrupted: Curve, elastic: Curve) -> None:
    """Print both loss curves side by side, and check that they are equal within ``TOLERANCE``."""
    table = Table("step", "4 ranks", "4, 2, 3, 1 ranks", "difference", box=None)
    for step in range(size.steps // 8, size.steps + 1, size.steps // 8):
        a, b = uninterrupted[step], elastic[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    log.console.print(table)
    same_steps = uninterrupted.keys() == elastic.keys()
    log.check(same_steps, "both runs have the same steps", required=True)
    largest = max(abs(uninterrupted[s] - elastic[s]) for s in uninterrupted)
    log.write(f"maximum difference over all {len(uninterrupted)} steps: {largest:.1e}")
    log.check(len(uninterrupted) == size.steps, f"the losses include all steps 1 to {size.steps}")
    log.check(largest <= TOLERANCE, f"no two losses differ by more than {TOLERANCE:g}")
    log.check(uninterrupted[size.steps] < uninterrupted[1] - 1, "the loss decreases")


def run_demo(log: CheckLog, size: TrainingSize, root: str) -> None:
    uninterrupted_run, elastic_run = f"{root}/uninterrupted", f"{root}/elastic"
    first, second, third = size.stops
    saved = size.last_save(first)
    with log.section("Uninterrupted", f"4 ranks, {size.steps} steps, parameters sharded by FSDP2."):
        uninterrupted = read_losses(log, train_on_ranks(4, uninterrupted_run, size))
    elastic: Curve = {}
    with log.section(
        "Four ranks", f"One rank is killed at step {first}; torchrun stops the others."
    ):
        elastic.update(read_losses(log, train_on_ranks(4, elastic_run, size, kill_at=first)))
        newest = limpet.Run(elastic_run).latest()
        # on a slow store, the next version may have been committed before all ranks were stopped
        step = 0 if newest is None else newest.step
        log.check(step >= saved, f"the newest version, of step {step}, was saved before the kill")
    with log.section(
        "Two ranks", f"Training resumes on two ranks and stops after {second} epochs."
    ):
        elastic.update(read_losses(log, train_on_ranks(2, elastic_run, size, epochs=second)))
    with log.section("Three ranks", f"A rank was added; one rank is killed at step {third}."):
        elastic.update(read_losses(log, train_on_ranks(3, elastic_run, size, kill_at=third)))
    with log.section("One rank", "A single rank trains the remaining steps."):
        elastic.update(read_losses(log, train_on_ranks(1, elastic_run, size)))
    with log.section(
        "Comparison", "Steps that were lost with a rank were repeated after resuming."
    ):
        compare_curves(log, size, uninterrupted, elastic)
        newest = limpet.Run(elastic_run).latest()
        log.check(
            newest is not None and newest.verify().ok,
            "every byte of the newest version matches its digest",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--root", help="folder or URL for the two runs, which are kept there")
    options = parser.parse_args()
    size = QUICK if options.quick else TrainingSize()
    log = CheckLog(Console(highlight=False, width=None if sys.stdout.isatty() else 100))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_demo(log, size, options.root or folder)
        except CheckFailed as e:
            log.write(f"[bold red]{e}")
            return 1
    return log.finish(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
