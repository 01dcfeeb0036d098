"""A training that changes its number of ranks, to be watched: ``make demo-elastic``.

Trains ``examples/fsdp.py`` beside this file undisturbed on 4 ranks, and a second time on 4, then
2, then 3, then 1, each time stopped in another way. Both must see the same losses, but for what
another order of additions gives. The exit code is 1 if a claim does not hold.
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

import holdfast

TOLERANCE = 1e-4
"""Largest difference of two losses that is allowed. Sums of float32 depend on their order, which
makes about 1e-6 here. A batch that was seen twice makes 1e-2 at least, at most steps 1e-1, and so
does an optimizer that has forgotten its state."""

LOSS_LINE = re.compile(r"step +(\d+)  loss (\S+)")
Curve = dict[int, float]


@dataclass(frozen=True)
class TrainingSize:
    """How many steps, and after which ones the four parts of the second training are stopped."""

    steps: int = 80
    every: int = 10
    stops: tuple[int, int, int] = (27, 45, 63)


QUICK = TrainingSize(steps=24, every=4, stops=(7, 12, 18))


def train_on_ranks(
    count: int, run: Path, size: TrainingSize, *, steps: int = 0, kill_at: int = 0
) -> Iterator[str]:
    """Train on so many ranks, and give the lines of rank 0. ``steps``: no further; ``kill_at``: one
    rank is killed at that step, and torchrun ends the others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += [str(EXAMPLES / "fsdp.py"), run.name, "--every", str(size.every)]
    command += ["--steps", str(steps or size.steps)]
    with subprocess.Popen(
        command,
        cwd=run.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                yield line.rstrip()
                found = LOSS_LINE.match(line)
                if found and int(found[1]) == kill_at:
                    os.kill(last_rank_process(process.pid), signal.SIGKILL)
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if not kill_at and code:
        raise CheckFailed(f"{count} ranks ended with code {code}")


def last_rank_process(launcher: int) -> int:
    """The last of the processes that torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return int(children[-1])


def read_losses(log: CheckLog, lines: Iterator[str]) -> Curve:
    """The losses of a training, and its first line for the reader."""
    curve: Curve = {}
    for line in lines:
        if found := LOSS_LINE.match(line):
            curve[int(found[1])] = float(found[2])
        else:
            log.write(line)
    if curve:
        first, last = min(curve), max(curve)
        log.write(f"steps {first} to {last}, loss {curve[first]:.4f} to {curve[last]:.4f}")
    return curve


def compare_curves(log: CheckLog, size: TrainingSize, one: Curve, other: Curve) -> None:
    table = Table("step", "4 ranks", "4, 2, 3, 1 ranks", "difference", box=None)
    for step in range(size.steps // 8, size.steps + 1, size.steps // 8):
        a, b = one[step], other[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    log.console.print(table)
    log.check(one.keys() == other.keys(), "both have the same steps", required=True)
    largest = max(abs(one[s] - other[s]) for s in one)
    log.write(f"the largest difference of all {len(one)} steps is {largest:.1e}")
    log.check(len(one) == size.steps, f"there are the losses of all steps 1 to {size.steps}")
    log.check(largest <= TOLERANCE, f"no two losses differ by more than {TOLERANCE:g}")
    log.check(one[size.steps] < one[1] - 1, "and they do go down")


def run_demo(log: CheckLog, size: TrainingSize, folder: Path) -> None:
    still, moved = folder / "undisturbed", folder / "elastic"
    first, second, third = size.stops
    saved = first // size.every * size.every
    with log.section("Undisturbed", f"Four ranks, {size.steps} steps, parameters cut by FSDP2."):
        one = read_losses(log, train_on_ranks(4, still, size))
    other: Curve = {}
    with log.section("Four ranks", f"One is killed at step {first}; torchrun ends the others."):
        other.update(read_losses(log, train_on_ranks(4, moved, size, kill_at=first)))
        left = holdfast.Run(str(moved)).latest()
        found = None if left is None else left.step
        log.check(found == saved, f"the newest version is of step {saved}")
    with log.section("Two ranks", f"They are what is left, and go on as far as step {second}."):
        other.update(read_losses(log, train_on_ranks(2, moved, size, steps=second)))
    with log.section("Three ranks", f"A rank has come, and one is killed at step {third}."):
        other.update(read_losses(log, train_on_ranks(3, moved, size, kill_at=third)))
    with log.section("One rank", "It makes the rest alone."):
        other.update(read_losses(log, train_on_ranks(1, moved, size)))
    with log.section("The two curves", "What was lost with a rank is made again by the next."):
        compare_curves(log, size, one, other)
        newest = holdfast.Run(str(moved)).latest()
        log.check(newest is not None and newest.verify().ok, "every byte of the last is proved")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    plan = QUICK if parser.parse_args().quick else TrainingSize()
    stage = CheckLog(Console(highlight=False, width=None if sys.stdout.isatty() else 100))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_demo(stage, plan, Path(folder))
        except CheckFailed as e:
            stage.write(f"[bold red]{e}")
            return 1
    return stage.finish(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
