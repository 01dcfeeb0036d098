"""A run under attack for a minute: kill -9, a second training, and every command at once.

One training runs until it is killed, at a random moment, and is started again. Meanwhile a second
training starts in the same run by mistake, and all commands run on it in loops, killed at random
as well. At the end, the state must equal that of an undisturbed training bit for bit, every version
must verify, and a sweep must leave no orphan.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from limpet.cli.exit_codes import DIFFERS, EXISTS, NOT_COMMITTED, NOT_FOUND, OK
from limpet.run.run import Run
from tests.crash import chaos
from tests.crash.promises import check_no_orphans
from tests.fork_server import FORK_SERVER

pytestmark = pytest.mark.chaos

SECONDS, MOST_SECONDS = 60.0, 300.0
"""The attack lasts until enough has happened, but at least and at most so long."""

PROCESS_LIMIT = 60.0
"""Seconds after which a process that was not killed counts as hanging."""


@dataclass
class Slot:
    """A place for one process at a time; ``next_work`` chooses what runs next in it."""

    name: str
    next_work: Callable[[], tuple[str, Callable[..., object], tuple[Any, ...]]]
    kill_within: tuple[float, float]
    kill_share: float
    kind: str = ""
    process: BaseProcess | None = None
    started: float = 0.0
    kill_at: float = float("inf")
    number: int = 0

    @property
    def file_name(self):
        return f"{self.name}-{self.number:04d}-{self.kind}"


@dataclass
class Chaos:
    """Starts, kills, and judges the processes."""

    folder: Path
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def start(self, slot):
        slot.kind, work, arguments = slot.next_work()
        slot.number += 1
        slot.process = FORK_SERVER.Process(
            target=chaos.run_and_report, args=(str(self.folder), slot.file_name, work, *arguments)
        )
        slot.process.start()
        slot.started = time.monotonic()
        killed = self.rng.random() < slot.kill_share
        slot.kill_at = slot.started + self.rng.uniform(*slot.kill_within) if killed else 1e18

    def watch(self, slot):
        """Kill, judge, or start the process of a slot, as due."""
        process, now = slot.process, time.monotonic()
        if process is None:
            self.start(slot)
        elif not process.is_alive():
            self.judge(slot)
            slot.process = None
        elif now >= slot.kill_at:
            self.stop(slot)
        elif now - slot.started > PROCESS_LIMIT:
            self.failures.append(f"{slot.file_name} still runs after {PROCESS_LIMIT:.0f} s")
            self.stop(slot)

    def stop(self, slot):
        """Kill the process of a slot with SIGKILL."""
        assert slot.process is not None
        slot.process.kill()
        slot.process.join()
        self.counts[f"{slot.kind}: killed"] += 1
        slot.process = None

    def judge(self, slot):
        """Count how a process ended by itself, and record an unexpected end as a failure."""
        assert slot.process is not None
        result = self.folder / f"{slot.file_name}.result"
        outcome = result.read_text() if result.exists() else f"died {slot.process.exitcode}"
        self.counts[f"{slot.kind}: {outcome.partition(':')[0][:60]}"] += 1
        output = (self.folder / f"{slot.file_name}.output").read_text()
        if not is_expected(slot.kind, outcome, output):
            self.failures.append(f"{slot.file_name}: {outcome}\n{output[-2000:]}")


EXPECTED_CODES = {
    "diff": {OK, DIFFERS, NOT_FOUND},
    "request-save": {OK, NOT_COMMITTED},
    "copy-run": {OK},
    "ls": {OK},
    "verify-run": {OK},
    "sweep": {OK},
    "pin": {OK, NOT_FOUND},
    "import": {OK, EXISTS},
}
"""The exit codes that a command may have besides the default: success, or a version that retention
has deleted in the meantime."""


COMMAND_KINDS = (
    "ls", "show", "verify-run", "verify", "diff", "copy", "copy-run", "reshard", "export", "import",
    "pin", "sweep", "request-save", "add-metrics",
)  # fmt: skip


def is_expected(kind, outcome, output):
    """Return True if a process of this kind may end like this.

    A training never ends by itself, unless it is refused because another one writes to the run, or
    because the version to go back to is gone. A copy of the run is refused if a training went back
    and the versions that it abandoned were swept since the last copy (docs/commands.md).
    """
    if kind == "copy-run" and outcome == f"exit {EXISTS}":
        return "sweep of abandoned versions" in " ".join(output.split())
    if kind.startswith("train"):
        gone = "has no version of step", "was deleted during the read"
        is_gone = kind == "train-back" and any(text in outcome for text in gone)
        return outcome.startswith(f"refused {chaos.REFUSED}") or is_gone
    if outcome.startswith("exit "):
        return int(outcome[5:]) in EXPECTED_CODES.get(kind, {OK, NOT_FOUND})
    return False


def cycle_commands(root, work, rng):
    """Yield the kind and the arguments of one command after another, on random versions."""
    number = 0
    while True:
        number += 1
        steps = [v.step for v in Run(root).listing().versions] or [0]
        one, other, new = rng.choice(steps), rng.choice(steps), f"{work}/new-{number}"
        commands = [
            ("ls", ["ls", root]),
            ("ls", ["ls", root, "--json"]),
            ("show", ["show", f"{root}@latest"]),
            ("show", ["show", f"{root}@{one}", "--json"]),
            ("verify-run", ["verify", root]),
            ("verify", ["verify", f"{root}@{one}"]),
            ("diff", ["diff", f"{root}@{one}", f"{root}@{other}"]),
            ("copy", ["copy", f"{root}@{one}", f"{new}-copy"]),
            ("copy-run", ["copy", root, str(work / "backup")]),
            ("reshard", ["reshard", f"{root}@{one}", f"{new}-reshard", "--shards", "3"]),
            ("export", ["export", f"{root}@{one}", f"{new}-export", "--to", "safetensors"]),
            ("export", ["export", f"{root}@latest", f"{new}.pt", "--to", "torch"]),
            ("import", ["import", str(work / "model.safetensors"), str(work / "imported"),
                        "--step", str(number)]),
            ("pin", ["pin", root, str(one)]),
            ("pin", ["pin", root, str(one), "--remove"]),
            ("sweep", ["sweep", root, "--grace", "0s"]),
            ("sweep", ["sweep", root, "--grace", "0s", "--abandoned"]),
            ("request-save", ["request-save", root, "--timeout", "5s"]),
        ]  # fmt: skip
        rng.shuffle(commands)
        yield from commands


def test_run_survives_chaos(tmp_path):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # for what the test chose; the moments of the kills are never the same
    rng = random.Random(seed)
    root, work, logs = str(tmp_path / "run"), tmp_path / "work", tmp_path / "logs"
    work.mkdir()
    logs.mkdir()
    save_file(chaos.Training().model.state_dict(), work / "model.safetensors")
    chaos.train(root, 3)  # from here on, there is always a version
    commands = cycle_commands(root, work, rng)

    def next_command():
        if rng.random() < 0.1:
            return "add-metrics", chaos.add_metrics, (root, rng.random())
        kind, arguments = next(commands)
        return kind, chaos.run_command, (arguments,)

    def next_training():
        versions = Run(root).line()
        if versions and rng.random() < 0.1:
            return "train-back", chaos.train_until_killed, (root, rng.choice(versions).step)
        return "train", chaos.train_until_killed, (root, None)

    slots = [
        Slot("training", next_training, (0.3, 8.0), 1.0),
        Slot("second", next_training, (0.1, 4.0), 1.0),
        *(Slot(f"command-{n}", next_command, (0.0, 1.0), 0.4) for n in range(3)),
    ]
    state = Chaos(logs, rng)
    began = time.monotonic()
    while not state.failures and (
        (seconds := time.monotonic() - began) < SECONDS
        or (missing(state.counts) and seconds < MOST_SECONDS)
    ):
        for slot in slots:
            state.watch(slot)
        time.sleep(0.005)
    for slot in slots:
        if slot.process is not None:
            state.stop(slot)
    print(json.dumps(dict(sorted(state.counts.items())), indent=1))
    assert not state.failures, "\n\n".join(state.failures)

    assert not missing(state.counts)
    check_end(root, work, tmp_path)


def missing(counts):
    """Return what has not happened often enough: kills, a refused training, and a success of every
    command."""
    kinds = {key.partition(":")[0] for key in counts} - {"train", "train-back"}
    assert kinds <= {*COMMAND_KINDS}
    found = [f"{kind}: exit 0" for kind in COMMAND_KINDS if not counts[f"{kind}: exit 0"]]
    if counts["train: killed"] < 10:
        found.append("train: killed")
    if not any(key.startswith("train: refused") for key in counts):
        found.append("train: refused")
    if sum(number for key, number in counts.items() if key.endswith("killed")) < 50:
        found.append("killed")
    return found


def check_end(root, work, tmp_path):
    """Check that the training continues as if nothing had happened, and what is left of the run."""
    run = Run(root)
    latest = run.latest()
    assert latest is not None
    last_step = latest.step + 10
    print(f"{latest.step} steps, {len(run.snapshots())} versions")
    disturbed = chaos.train(root, last_step)
    assert disturbed == chaos.train(str(tmp_path / "undisturbed"), last_step, every=1 << 40)

    run = Run(root)
    for version in run.listing().versions:
        report = run.open(version).verify()
        assert report.ok, report.problems
    for version in {*run.listing().lasting_pins}:
        run.unpin(version.step, version.branch)  # perhaps not on the current lineage
    swept = run.sweep(grace=0, abandoned=True, now=time.time() + 120)
    assert swept.kept == []
    check_no_orphans(run)
    for folder in ("backup", "imported"):
        copy = Run(str(work / folder))
        for version in copy.listing().versions:
            assert copy.open(version).verify().ok
