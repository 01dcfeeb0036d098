"""The main job, to be watched: ``make demo``, or ``python examples/demo.py``.

Trains ``examples/train.py`` beside this file twice: once undisturbed, once killed in the middle
of a save. Then breaks a bit. Every claim that is printed with a mark was checked the moment before;
the exit code is 1 if one of them does not hold.
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
    kill_in_save,
    run_training,
    step_of,
    version_folders,
    written_bytes,
)
from demo_compare import compare_runs, compare_savers, flip_bit
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

import holdfast
from holdfast.errors import HoldfastError, NotFound


def run_undisturbed(log: CheckLog, size: TrainingSize, run: Path) -> None:
    trained = run_training(log, size, run)
    first, last = trained.find_line("step"), trained.lines[-2] if len(trained.lines) > 1 else ""
    log.write(f"{first}")
    log.write(f"{last}    [dim]in {trained.seconds:.1f} s, starting Python and torch included")
    log.write(escape(trained.lines[-1]) if trained.lines else "")
    log.check(trained.code == 0, f"run-a reached step {size.steps}", required=True)


def run_killed(log: CheckLog, size: TrainingSize, run: Path) -> Path:
    """Train and strike until a save has been hit in its middle; the folder of that version."""
    after = size.kill_after
    for attempt in range(1, MAX_ATTEMPTS + 1):
        trained = run_training(log, size, run, kill_in_save(run, after))
        struck = [f for f in version_folders(run) if not (f / "manifest.json").exists()]
        shards = [p for f in struck for p in f.iterdir() if "shard-" in p.name]
        if trained.code == -signal.SIGKILL and shards:
            break
        log.write(f"[yellow]the save was faster (attempt {attempt}); once more")
        after = max(map(step_of, version_folders(run)))
        if after >= size.steps:
            shutil.rmtree(run)
            after = size.kill_after
    else:
        raise CheckFailed(f"a save was hit in its middle within {MAX_ATTEMPTS} attempts")
    folder = struck[-1]
    log.write(f"{trained.lines[-1]}")
    log.write(f"[bold red]SIGKILL[/] while {folder.name} was being written. What lies there now:")
    for path in sorted(folder.iterdir()):
        log.write(escape(path.name), 4)
        log.write(f"[dim]{written_bytes(path):,} of {path.stat().st_size:,} bytes written", 4)
    log.check(trained.code == -signal.SIGKILL, "the process was ended by signal 9")
    log.check(
        bool(shards) and not (folder / "manifest.json").exists(),
        f"{folder.name} has the leftovers of a shard and no manifest: it does not exist",
        required=True,
    )
    try:
        holdfast.open(folder)
        opened = True
    except NotFound:
        opened = False
    log.check(not opened, f"holdfast.open({folder.name!r}) raises NotFound")
    newest = holdfast.Run(run).latest()
    log.check(
        newest is not None and newest.step == step_of(folder) - size.every and newest.verify().ok,
        f"the newest version is the one before, step {newest.step if newest else None}, and every"
        " digest of it is right",
    )
    return folder


def run_resumed(log: CheckLog, size: TrainingSize, a: Path, b: Path, folder: Path) -> None:
    trained = run_training(log, size, b)
    log.write(f"{escape(trained.find_line('going on'))}")
    log.write(trained.lines[-2] if len(trained.lines) > 1 else "")
    log.check(trained.code == 0, f"the second process reached step {size.steps}", required=True)
    before = f"version_{step_of(folder) - size.every}"
    log.check(trained.find_line("going on").endswith(before), f"it went on from {before}")
    compare_runs(log, a, b)


def run_damaged(log: CheckLog, size: TrainingSize, a: Path, b: Path) -> None:
    newest = f"version_{size.steps}"
    shard = next((b / newest).glob("shard-*.safetensors"))
    log.write(f"{newest}/{shard.name}")
    log.write(flip_bit(shard))
    trained = run_training(log, size, b)
    told = next((s for s in trained.warnings.splitlines() if "SkippedVersion" in s), "")
    log.write(f"[yellow]{escape(told[told.find('SkippedVersion') :])}")
    log.write(escape(trained.find_line("going on")))
    before = f"version_{size.steps - size.every}"
    log.check(trained.code == 0, f"training reached step {size.steps} again", required=True)
    log.check(f"{newest} is skipped" in told, f"resume() said that {newest} is damaged")
    log.check(trained.find_line("going on").endswith(before), f"it went on from {before}")
    record = b / "branch-1.json"
    left = json.loads(record.read_bytes()) if record.exists() else {}
    log.check(before in left.values(), f"branch-1.json records that it left from {before}")
    log.check(
        holdfast.open(b / f"{newest}.1").manifest.branch == 1 and shard.exists(),
        f"the new version is {newest}.1; the damaged one is left as it was found",
    )
    compare_runs(log, a, b)


def run_command(
    log: CheckLog, work: Path, arguments: list[str], exit_code: int, max_lines: int = 16
) -> None:
    """Run the installed command, and print what it prints."""
    terminal = log.console.is_terminal
    environment = {**os.environ, "COLUMNS": str(log.console.width - 4)}
    if terminal:
        environment |= {"FORCE_COLOR": "1"}
    done = subprocess.run(
        [COMMAND, *arguments],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    log.write(f"[bold]$ holdfast {' '.join(arguments)}")
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    for line in lines[:max_lines]:
        log.console.print(Padding(Text.from_ansi(line), (0, 0, 0, 4), expand=False))
    if len(lines) > max_lines:
        log.write(f"  [dim]... and {len(lines) - max_lines} more lines")
    log.check(done.returncode == exit_code, f"exit code {exit_code}")
    log.console.print()


def run_demo(log: CheckLog, size: TrainingSize, work: Path) -> None:
    a, b = work / "run-a", work / "run-b"
    with log.section(
        "Undisturbed",
        f"A run of {size.steps} steps, saved every {size.every} steps"
        " while training goes on, as the measure for all that follows.",
    ):
        run_undisturbed(log, size, a)
    with log.section(
        "Killed",
        "The same run in another folder, until it is killed in the middle of a"
        " save: a snapshot exists whole, or not at all.",
    ):
        folder = run_killed(log, size, b)
    with log.section(
        "Resumed",
        "The same command again: it goes on from the newest version, and ends"
        " as if nothing had happened.",
    ):
        run_resumed(log, size, a, b, folder)
    with log.section(
        "Damaged",
        "One bit of the newest version is flipped on the disk: resume says so"
        " and takes the version before, on a new branch.",
    ):
        run_damaged(log, size, a, b)
    with log.section(
        "Looked into",
        "What lies in the second run now, as the commands tell it; the last one removes what the"
        " killed save left.",
    ):
        run_command(log, work, ["ls", "run-b"], 0)
        run_command(log, work, ["show", f"run-b/version_{size.steps}.1"], 0)
        run_command(log, work, ["verify", "run-b"], 3)
        run_command(log, work, ["sweep", "run-b", "--grace", "0s"], 0)
    with log.section("Compared", "The same state saved with torch.save and with safetensors."):
        compare_savers(log, size, a, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the folder with the two runs")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = min(console.width, 100)
    stage = CheckLog(console)
    began = time.perf_counter()
    about = f"PyTorch {torch.__version__}, {os.cpu_count()} cores"
    stage.write(f"[bold]Holdfast {version('holdfast')}[/], {about}", 0)
    work = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        run_demo(stage, QUICK if options.quick else TrainingSize(), work)
    except (CheckFailed, HoldfastError) as e:
        if str(e) not in stage.failed:
            stage.check(False, escape(str(e)))
    finally:
        if options.keep:
            stage.write(f"kept: {work}", 0)
        else:
            shutil.rmtree(work)
    return stage.finish(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
