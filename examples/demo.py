"""Demonstrate a training that survives a kill and a flipped bit: ``make demo``.

This script (``python examples/demo.py``) runs ``examples/train.py`` twice: once without
interruption, and once killed in the middle of a save. Then it flips a bit of a version. Every line
with a check mark was checked immediately before it was printed. The exit code is 1 if a check
fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from demo_common import (
    COMMAND,
    MAX_ATTEMPTS,
    QUICK,
    CheckFailed,
    CheckLog,
    TrainingSize,
    files_of,
    kill_in_save,
    name_of,
    run_training,
    step_of,
    unfinished_shards,
    version_folders,
    written_bytes,
)
from demo_compare import compare_runs, compare_savers, flip_stored_bit
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

import limpet
from limpet.errors import LimpetError, NotFound


def run_uninterrupted(log: CheckLog, size: TrainingSize, run: str) -> None:
    result = run_training(log, size, run)
    first, last = result.find_line("step"), result.lines[-2] if len(result.lines) > 1 else ""
    log.write(f"{first}")
    log.write(f"{last}    [dim]in {result.seconds:.1f} s, including the start of Python and torch")
    log.write(escape(result.lines[-1]) if result.lines else "")
    log.check(result.code == 0, f"run-a reached step {size.steps}", required=True)


def run_killed(log: CheckLog, size: TrainingSize, run: str) -> str:
    """Train and kill until a kill hits the middle of a save; return the name of that version."""
    after = size.kill_after
    for attempt in range(1, MAX_ATTEMPTS + 1):
        result = run_training(log, size, run, kill_in_save(run, after))
        committed = {str(s.version) for s in limpet.Run(run).snapshots()}
        uncommitted = [f for f in version_folders(run) if f not in committed]
        shards = unfinished_shards(run)
        if result.code == -signal.SIGKILL and shards:
            break
        log.write(f"[yellow]the save finished before the kill (attempt {attempt}); trying again")
        after = max(map(step_of, version_folders(run)))
        if after >= size.steps:
            remove_run(run)
            after = size.kill_after
    else:
        raise CheckFailed(f"a save was killed in the middle within {MAX_ATTEMPTS} attempts")
    folder = uncommitted[-1]
    log.write(f"{result.lines[-1]}")
    log.write(f"[bold red]SIGKILL[/] while {folder} was being written. It now contains:")
    files = files_of(run, folder)
    for key in sorted([*files, *shards]):
        log.write(escape(name_of(key)), 4)
        if "://" in run:
            log.write("[dim]an upload in parts that was not completed", 4)
        else:
            path = Path(run, key)
            log.write(f"[dim]{written_bytes(path):,} of {path.stat().st_size:,} bytes written", 4)
    log.check(result.code == -signal.SIGKILL, "the process was ended by signal 9")
    log.check(
        bool(shards) and f"{folder}/manifest.json" not in files,
        f"{folder} has a partial shard and no manifest, so it is not a version",
        required=True,
    )
    try:
        limpet.open(f"{run}/{folder}")
        opened = True
    except NotFound:
        opened = False
    log.check(not opened, f"limpet.open({folder!r}) raises NotFound")
    newest = limpet.Run(run).latest()
    log.check(
        newest is not None and newest.step == step_of(folder) - size.every and newest.verify().ok,
        f"the newest version is the previous one, step {newest.step if newest else None}, and all"
        " of its digests match",
    )
    return folder


def remove_run(run: str) -> None:
    store = limpet.open_store(run)
    for stat in [*store.list(""), *store.partials("")]:
        store.delete(stat.key)


def run_resumed(log: CheckLog, size: TrainingSize, a: str, b: str, folder: str) -> None:
    result = run_training(log, size, b)
    log.write(f"{escape(result.find_line('resuming'))}")
    log.write(result.lines[-2] if len(result.lines) > 1 else "")
    log.check(result.code == 0, f"the second process reached step {size.steps}", required=True)
    previous = f"version_{step_of(folder) - size.every}"
    log.check(result.find_line("resuming").endswith(previous), f"it resumed from {previous}")
    compare_runs(log, a, b)


def run_damaged(log: CheckLog, size: TrainingSize, a: str, b: str) -> None:
    newest = f"version_{size.steps}"
    shard = next(key for key in files_of(b, newest) if key.endswith(".safetensors"))
    log.write(shard)
    log.write(flip_stored_bit(b, shard))
    result = run_training(log, size, b)
    warning = next((s for s in result.warnings.splitlines() if "SkippedVersion" in s), "")
    log.write(f"[yellow]{escape(warning[warning.find('SkippedVersion') :])}")
    log.write(escape(result.find_line("resuming")))
    previous = f"version_{size.steps - size.every}"
    log.check(result.code == 0, f"training reached step {size.steps} again", required=True)
    log.check(f"{newest} is skipped" in warning, f"resume() reported that {newest} is damaged")
    log.check(result.find_line("resuming").endswith(previous), f"it resumed from {previous}")
    try:
        record = json.loads(limpet.open_store(b).get("branch-1.json", 1 << 20))
    except NotFound:
        record = {}
    log.check(
        previous in record.values(), f"branch-1.json records that branch 1 starts at {previous}"
    )
    log.check(
        limpet.open(f"{b}/{newest}.1").version.branch == 1 and shard in files_of(b, newest),
        f"the new version is {newest}.1; the damaged version is unchanged",
    )
    compare_runs(log, a, b)


def run_command(
    log: CheckLog, root: str, arguments: list[str], exit_code: int, max_lines: int = 16
) -> None:
    """Run the installed ``limpet`` command, and print its output."""
    terminal = log.console.is_terminal
    environment = {**os.environ, "COLUMNS": str(log.console.width - 4)}
    if terminal:
        environment |= {"FORCE_COLOR": "1"}
    result = subprocess.run(
        [COMMAND, *arguments],
        cwd=None if "://" in root else root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    log.write(f"[bold]$ limpet {' '.join(arguments)}")
    lines = (result.stdout + result.stderr).rstrip().splitlines()
    for line in lines[:max_lines]:
        log.console.print(Padding(Text.from_ansi(line), (0, 0, 0, 4), expand=False))
    if len(lines) > max_lines:
        log.write(f"  [dim]... and {len(lines) - max_lines} more lines")
    log.check(result.returncode == exit_code, f"exit code {exit_code}")
    log.console.print()


def run_demo(log: CheckLog, size: TrainingSize, root: str, work: Path) -> None:
    a, b = f"{root}/run-a", f"{root}/run-b"
    shown = b if "://" in root else "run-b"
    with log.section(
        "Uninterrupted",
        f"A run of {size.steps} steps that saves every {size.every} steps while training continues."
        " The following sections compare with this run.",
    ):
        run_uninterrupted(log, size, a)
    with log.section(
        "Killed",
        "The same run in another folder, killed in the middle of a save. A snapshot exists"
        " completely, or not at all.",
    ):
        folder = run_killed(log, size, b)
    with log.section(
        "Resumed",
        "The same command again. It resumes from the newest version, and the final state is equal"
        " to that of the uninterrupted run.",
    ):
        run_resumed(log, size, a, b, folder)
    with log.section(
        "Damaged",
        "One bit of the newest version is flipped where it is stored. resume() reports the damage"
        " and uses the previous version, on a new branch.",
    ):
        run_damaged(log, size, a, b)
    with log.section(
        "Inspected",
        "The commands show the second run. The last command removes the files of the killed save.",
    ):
        run_command(log, root, ["ls", shown], 0)
        run_command(log, root, ["show", f"{shown}/version_{size.steps}.1"], 0)
        run_command(log, root, ["verify", shown], 3)
        run_command(log, root, ["sweep", shown, "--grace", "0s"], 0)
    with log.section("Compared", "The same state saved with torch.save and with safetensors."):
        compare_savers(log, size, a, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the folder with the two runs")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--root", help="folder or URL for the two runs, which are kept there")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = min(console.width, 100)
    log = CheckLog(console)
    began = time.perf_counter()
    machine = f"PyTorch {torch.__version__}, {os.cpu_count()} cores"
    log.write(f"[bold]Limpet {version('limpet')}[/], {machine}", 0)
    work = Path(tempfile.mkdtemp(prefix="limpet-demo-"))
    try:
        run_demo(log, QUICK if options.quick else TrainingSize(), options.root or str(work), work)
    except (CheckFailed, LimpetError) as e:
        if str(e) not in log.failed:
            log.check(False, escape(str(e)))
    finally:
        if options.keep:
            log.write(f"The two runs are in {work}", 0)
        else:
            shutil.rmtree(work)
    return log.finish(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
