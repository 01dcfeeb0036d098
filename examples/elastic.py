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

from demo_stage import HERE, Broken, Stage
from rich.console import Console
from rich.table import Table

import holdfast

TOLERANCE = 1e-4
"""Largest difference of two losses that is allowed. Sums of float32 depend on their order, which
makes about 1e-6 here. A batch that was seen twice makes 1e-2 at least, at most steps 1e-1, and so
does an optimizer that has forgotten its state."""

LINE = re.compile(r"step +(\d+)  loss (\S+)")
Curve = dict[int, float]


@dataclass(frozen=True)
class Plan:
    """How many steps, and after which ones the four parts of the second training are stopped."""

    steps: int = 80
    every: int = 10
    stops: tuple[int, int, int] = (27, 45, 63)


QUICK = Plan(steps=24, every=4, stops=(7, 12, 18))


def ranks(count: int, run: Path, plan: Plan, *, steps: int = 0, kill_at: int = 0) -> Iterator[str]:
    """Train on so many ranks, and give the lines of rank 0. ``steps``: no further; ``kill_at``: one
    rank is killed at that step, and torchrun ends the others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += [str(HERE / "fsdp.py"), run.name, "--every", str(plan.every)]
    command += ["--steps", str(steps or plan.steps)]
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
                found = LINE.match(line)
                if found and int(found[1]) == kill_at:
                    os.kill(victim(process.pid), signal.SIGKILL)
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if not kill_at and code:
        raise Broken(f"{count} ranks ended with code {code}")


def victim(launcher: int) -> int:
    """The last of the processes that torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return int(children[-1])


def told(stage: Stage, lines: Iterator[str]) -> Curve:
    """The losses of a training, and its first line for the reader."""
    curve: Curve = {}
    for line in lines:
        if found := LINE.match(line):
            curve[int(found[1])] = float(found[2])
        else:
            stage.say(line)
    if curve:
        first, last = min(curve), max(curve)
        stage.say(f"steps {first} to {last}, loss {curve[first]:.4f} to {curve[last]:.4f}")
    return curve


def compare(stage: Stage, plan: Plan, one: Curve, other: Curve) -> None:
    table = Table("step", "4 ranks", "4, 2, 3, 1 ranks", "difference", box=None)
    for step in range(plan.steps // 8, plan.steps + 1, plan.steps // 8):
        a, b = one[step], other[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    stage.console.print(table)
    stage.check(one.keys() == other.keys(), "both have the same steps", vital=True)
    largest = max(abs(one[s] - other[s]) for s in one)
    stage.say(f"the largest difference of all {len(one)} steps is {largest:.1e}")
    stage.check(len(one) == plan.steps, f"there are the losses of all steps 1 to {plan.steps}")
    stage.check(largest <= TOLERANCE, f"no two losses differ by more than {TOLERANCE:g}")
    stage.check(one[plan.steps] < one[1] - 1, "and they do go down")


def show(stage: Stage, plan: Plan, folder: Path) -> None:
    still, moved = folder / "undisturbed", folder / "elastic"
    first, second, third = plan.stops
    saved = first // plan.every * plan.every
    with stage.part("Undisturbed", f"Four ranks, {plan.steps} steps, parameters cut by FSDP2."):
        one = told(stage, ranks(4, still, plan))
    other: Curve = {}
    with stage.part("Four ranks", f"One is killed at step {first}; torchrun ends the others."):
        other.update(told(stage, ranks(4, moved, plan, kill_at=first)))
        left = holdfast.Run(str(moved)).latest()
        found = None if left is None else left.step
        stage.check(found == saved, f"the newest version is of step {saved}")
    with stage.part("Two ranks", f"They are what is left, and go on as far as step {second}."):
        other.update(told(stage, ranks(2, moved, plan, steps=second)))
    with stage.part("Three ranks", f"A rank has come, and one is killed at step {third}."):
        other.update(told(stage, ranks(3, moved, plan, kill_at=third)))
    with stage.part("One rank", "It makes the rest alone."):
        other.update(told(stage, ranks(1, moved, plan)))
    with stage.part("The two curves", "What was lost with a rank is made again by the next."):
        compare(stage, plan, one, other)
        newest = holdfast.Run(str(moved)).latest()
        stage.check(newest is not None and newest.verify().ok, "every byte of the last is proved")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    plan = QUICK if parser.parse_args().quick else Plan()
    stage = Stage(Console(highlight=False, width=None if sys.stdout.isatty() else 100))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            show(stage, plan, Path(folder))
        except Broken as e:
            stage.say(f"[bold red]{e}")
            return 1
    return stage.end(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
