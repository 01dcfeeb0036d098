"""Demonstrate a training whose versions another job evaluates: ``make demo-evaluate``.

This script (``python examples/demo_evaluate.py``) runs ``examples/train.py`` on a small part of its
text, so that it soon learns that part by heart. Beside it, ``limpet evaluate`` scores each
version with three workers, two of which are killed. The training reads the scores, and stops by
itself. The best version is exported, and generates text. The exit code is 1 if a check fails.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from demo_common import COMMAND, EXAMPLES, CheckFailed, CheckLog
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file
from scoring import build, evaluate, generate, held_out

import limpet
from limpet.errors import LimpetError

METRIC = "val/loss"
PATIENCE = 3
EPOCHS, WINDOWS, BATCH = 160, 96, 8
"""Far more epochs than the training needs until its scores become worse."""

STEPS = EPOCHS * WINDOWS // BATCH

START_SECONDS, STOP_SECONDS = 120.0, 600.0


def start_training(run: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "train.py"), "--run", run, "--log", "50"]
    command += ["--epochs", str(EPOCHS), "--windows", str(WINDOWS), "--batch", str(BATCH)]
    command += ["--every", "20", "--keep", "5", "--patience", str(PATIENCE)]
    command += ["--layers", "2", "--width", "96"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start_evaluation(run: str) -> subprocess.Popen[str]:
    command = [str(COMMAND), "evaluate", run, "--with", "scoring", "--data", "scoring:held_out"]
    command += ["--keys", "model/**", "--workers", "3", "--follow", "--metric", METRIC]
    command += ["--mode", "min", "--batch-size", "64"]
    return subprocess.Popen(command, cwd=EXAMPLES, stdout=subprocess.PIPE, text=True)


def kill_workers(log: CheckLog, run: str, evaluation: subprocess.Popen[str]) -> None:
    """Send SIGKILL to two of the three workers once the first version is being evaluated."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        leases = limpet.Run(run).catalog.leases.live()
        workers = _children_of(evaluation.pid)
        if any(lease.versions for lease in leases.values()) and len(workers) == 3:
            break
        time.sleep(0.02)
    else:
        raise CheckFailed(f"an evaluation by three workers began within {START_SECONDS:.0f} s")
    killed = workers[:2]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    log.write(f"[bold red]SIGKILL[/] to two of the three workers, {killed[0]} and {killed[1]}")


def _children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def score_alone(url: str) -> float:
    """Return the score of a version from a loop over the data in this process."""
    model = build(limpet.load(url, keys="model/**")["model"])
    total = count = 0.0
    with torch.no_grad():
        for windows in held_out().split(64):
            loss, number = evaluate(model, windows)[METRIC]
            total, count = total + loss, count + number
    return total / count


def show_scores(log: CheckLog, run: limpet.Run) -> limpet.Snapshot:
    """Print the versions that are left with their scores, and return the best one."""
    best = run.best(METRIC, "min")
    if best is None:
        raise CheckFailed("a version was evaluated")
    table = Table("version", METRIC, "val/accuracy", "", box=None, pad_edge=False)
    checked = True
    for snapshot in run.snapshots():
        metrics = run.metrics(snapshot)
        if METRIC not in metrics:
            table.add_row(str(snapshot.version), "[dim]not evaluated", "", "")
            continue
        is_best = snapshot.version == best.version
        style, mark = ("bold green", "best") if is_best else ("", "")
        values = f"{metrics[METRIC]:.4f}", f"{metrics['val/accuracy']:.1%}"
        table.add_row(str(snapshot.version), *values, mark, style=style)
        checked &= abs(score_alone(snapshot.url) - metrics[METRIC]) < 1e-5
    log.console.print(table)
    log.console.print()
    log.check(checked, "each score equals that of a loop over the data in one process")
    return best


def demonstrate(log: CheckLog, folder: str) -> None:
    run = f"{folder}/run"
    with log.section(
        "Train and evaluate",
        "A training saves a version every 20 steps. Another job scores each one on other text.",
    ):
        evaluation, training = start_evaluation(run), start_training(run)
        try:
            kill_workers(log, run, evaluation)
            lines, _ = training.communicate(timeout=STOP_SECONDS)
            scores, _ = evaluation.communicate(timeout=STOP_SECONDS)
        finally:
            for process in (training, evaluation):
                process.kill()
                process.wait()
        for line in scores.splitlines():
            log.write(escape(line))
        last = max(snapshot.step or 0 for snapshot in limpet.Run(run).snapshots())
        log.check(
            training.returncode == 0 and last < STEPS,
            f"the training stopped by itself after step {last} of {STEPS}: {PATIENCE} scores in a"
            " row were not better",
            required=True,
        )
        log.write(f"[dim]{lines.splitlines()[-1]}")
        log.check(evaluation.returncode == 0, "the evaluation ended with the training")
    opened = limpet.Run(run)
    with log.section("Scores", "The versions that retention kept: the last five, and the best."):
        best = show_scores(log, opened)
        log.check((best.step or 0) < last, f"the best version, {best.version}, is not the last one")
    with log.section("Export", f"limpet export {Path(run).name}@best --to safetensors"):
        file = f"{folder}/model.safetensors"
        command = [str(COMMAND), "export", f"{run}@best", "--to", "safetensors", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log.write(escape(done.stdout + done.stderr))
        log.check(done.returncode == 0, "the best version was exported", required=True)
        model = build(load_file(file))
        torch.manual_seed(0)
        text = generate(model, "The ", 200)
        log.write(escape(text))
        log.check(len(text) > 100, "the exported model generates text")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    log, began = CheckLog(Console(highlight=False)), time.perf_counter()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="limpet-demo-", dir="/var/tmp") as folder:
        try:
            demonstrate(log, folder)
        except (CheckFailed, LimpetError, subprocess.TimeoutExpired) as e:
            log.check(False, escape(f"the demonstration ran to its end: {e}"))
    return log.finish(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
