"""``python -m tests.chaos --seconds 120 --seed 1``: exit code 1 if anything is wrong."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from limpet.run.run import Run
from tests.chaos.cluster import Cluster
from tests.chaos.ranks import Ranks, wait_until
from tests.chaos.report import (
    TOLERANCE,
    compare_samples,
    compare_states,
    executed_samples,
    print_rows,
    print_time,
    verify_run,
)
from tests.chaos.schedule import NEEDS_ROOT, Kind, make_schedule
from tests.chaos.supervisor import Supervisor
from tests.chaos.training import Start

LAST_STEPS = 25
"""Undisturbed steps at the end."""

LEAST_EFFECTIVE, EFFECTIVE_EVERY = 0.95, 120.0
"""The effective training time with an event every two minutes, or more rarely."""


def run_chaos(console, folder, seed, *, changes_size, seconds=0.0, least_events=0, every=0.0):
    """Disturb one training, compare it with an undisturbed one, and return what is wrong."""
    dropout = 0.0 if changes_size else 0.1  # its random numbers depend on the number of ranks
    ranks = "other numbers of ranks" if changes_size else "4 ranks"
    console.rule(f"seed {seed}, {ranks}", align="left")
    with Cluster(folder) as cluster:
        events = make_schedule(seed, changes_size=changes_size, is_root=cluster.has_mounts)
        if not cluster.has_mounts:
            console.print(f"not covered: {', '.join(sorted(NEEDS_ROOT))} (only root can mount)")
        if every:  # the others are not apart
            events = (event for event in events if event.kind != Kind.EARLY_KILL)
        supervisor = Supervisor(cluster, dropout, every)
        last_step = supervisor.train(events, seconds, least_events, LAST_STEPS)
        wall = time.monotonic() - supervisor.began
        print_rows(console, supervisor.rows)
        if supervisor.failures:
            return supervisor.failures
        share = print_time(console, supervisor, wall)
        problems = verify_run(supervisor) + supervisor.evaluator.finish(supervisor.flipped)
        if every >= EFFECTIVE_EVERY and share < LEAST_EFFECTIVE:
            problems.append(f"the effective training time is {share:.3f}, not {LEAST_EFFECTIVE}")
        size = 1 if changes_size else 4
        undisturbed = train_undisturbed(folder, size, last_step, dropout)
        found = executed_samples(supervisor.starts)
        problems += compare_samples(found, executed_samples([undisturbed]))
        tolerance = TOLERANCE if changes_size else 0.0
        different, largest = compare_states(cluster.run, undisturbed.start.run, tolerance)
        console.print(
            f"{len(found)} steps in the order of the undisturbed training; the largest difference"
            f" of two values is {largest:.1e} (allowed: {tolerance:g})"
            if not problems + different
            else "the result is wrong"
        )
        return problems + different


def train_undisturbed(folder, size, last_step, dropout):
    own = folder / "undisturbed"
    own.mkdir()
    ranks = Ranks(Start(str(own), str(own / "run"), size, last_step, dropout))
    try:
        wait_until(lambda: not ranks.alive or ranks.has_failed, 60 + last_step, "undisturbed")
    finally:
        ranks.kill()
    newest = Run(ranks.start.run).latest()
    if newest is None or newest.step != last_step:
        raise RuntimeError(f"the undisturbed training failed\n{ranks.describe()}")
    return ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for all trainings together")
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS",
                        help="from one event to the next; default: after some steps")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="determines the schedule")
    parser.add_argument("--ranks", choices=["same", "other", "both"], default="both")
    parser.add_argument("--keep", action="store_true", help="keep the traces of the ranks")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is mounted must not stay
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 170)
    kinds = {"same": [False], "other": [True], "both": [False, True]}[options.ranks]
    failures = []
    for changes_size in kinds:
        folder = Path(tempfile.mkdtemp(prefix="limpet-chaos-"))
        seconds = options.seconds / len(kinds)
        found = run_chaos(
            console, folder, options.seed,
            changes_size=changes_size, seconds=seconds, every=options.every,
        )  # fmt: skip
        failures += found
        for failure in found:
            console.print(failure, style="bold red", markup=False)
        if options.keep or found:
            console.print(f"the traces are in {folder}")
        else:
            shutil.rmtree(folder)
    console.print("[bold red]failed" if failures else "[bold green]everything is as it must be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
