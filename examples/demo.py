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
from demo_compare import against, compare_runs, flip_bit
from demo_stage import (
    QUICK,
    TOOL,
    TRIES,
    Broken,
    Plan,
    Stage,
    folders,
    kill_in_save,
    start,
    step_of,
    written,
)
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

import holdfast
from holdfast.errors import HoldfastError, NotFound


def undisturbed(stage: Stage, plan: Plan, run: Path) -> None:
    trained = start(stage, plan, run)
    first, last = trained.said("step"), trained.lines[-2] if len(trained.lines) > 1 else ""
    stage.say(f"{first}")
    stage.say(f"{last}    [dim]in {trained.seconds:.1f} s, starting Python and torch included")
    stage.say(escape(trained.lines[-1]) if trained.lines else "")
    stage.check(trained.code == 0, f"run-a reached step {plan.steps}", vital=True)


def killed(stage: Stage, plan: Plan, run: Path) -> Path:
    """Train and strike until a save has been hit in its middle; the folder of that version."""
    after = plan.kill_after
    for attempt in range(1, TRIES + 1):
        trained = start(stage, plan, run, kill_in_save(run, after))
        struck = [f for f in folders(run) if not (f / "manifest.json").exists()]
        shards = [p for f in struck for p in f.iterdir() if "shard-" in p.name]
        if trained.code == -signal.SIGKILL and shards:
            break
        stage.say(f"[yellow]the save was faster (attempt {attempt}); once more")
        after = max(map(step_of, folders(run)))
        if after >= plan.steps:
            shutil.rmtree(run)
            after = plan.kill_after
    else:
        raise Broken(f"a save was hit in its middle within {TRIES} attempts")
    folder = struck[-1]
    stage.say(f"{trained.lines[-1]}")
    stage.say(f"[bold red]SIGKILL[/] while {folder.name} was being written. What lies there now:")
    for path in sorted(folder.iterdir()):
        stage.say(escape(path.name), 4)
        stage.say(f"[dim]{written(path):,} of {path.stat().st_size:,} bytes written", 4)
    stage.check(trained.code == -signal.SIGKILL, "the process was ended by signal 9")
    stage.check(
        bool(shards) and not (folder / "manifest.json").exists(),
        f"{folder.name} has the leftovers of a shard and no manifest: it does not exist",
        vital=True,
    )
    try:
        holdfast.open(folder)
        opened = True
    except NotFound:
        opened = False
    stage.check(not opened, f"holdfast.open({folder.name!r}) raises NotFound")
    newest = holdfast.Run(run).latest()
    stage.check(
        newest is not None and newest.step == step_of(folder) - plan.every and newest.verify().ok,
        f"the newest version is the one before, step {newest.step if newest else None}, and every"
        " digest of it is right",
    )
    return folder


def resumed(stage: Stage, plan: Plan, a: Path, b: Path, folder: Path) -> None:
    trained = start(stage, plan, b)
    stage.say(f"{escape(trained.said('going on'))}")
    stage.say(trained.lines[-2] if len(trained.lines) > 1 else "")
    stage.check(trained.code == 0, f"the second process reached step {plan.steps}", vital=True)
    before = f"version_{step_of(folder) - plan.every}"
    stage.check(trained.said("going on").endswith(before), f"it went on from {before}")
    compare_runs(stage, a, b)


def damaged(stage: Stage, plan: Plan, a: Path, b: Path) -> None:
    newest = f"version_{plan.steps}"
    shard = next((b / newest).glob("shard-*.safetensors"))
    stage.say(f"{newest}/{shard.name}")
    stage.say(flip_bit(shard))
    trained = start(stage, plan, b)
    told = next((s for s in trained.warnings.splitlines() if "SkippedVersion" in s), "")
    stage.say(f"[yellow]{escape(told[told.find('SkippedVersion') :])}")
    stage.say(escape(trained.said("going on")))
    before = f"version_{plan.steps - plan.every}"
    stage.check(trained.code == 0, f"training reached step {plan.steps} again", vital=True)
    stage.check(f"{newest} is skipped" in told, f"resume() said that {newest} is damaged")
    stage.check(trained.said("going on").endswith(before), f"it went on from {before}")
    record = b / "branch-1.json"
    left = json.loads(record.read_bytes()) if record.exists() else {}
    stage.check(before in left.values(), f"branch-1.json records that it left from {before}")
    stage.check(
        holdfast.open(b / f"{newest}.1").manifest.branch == 1 and shard.exists(),
        f"the new version is {newest}.1; the damaged one is left as it was found",
    )
    compare_runs(stage, a, b)


def command(stage: Stage, work: Path, words: list[str], code: int, rows: int = 16) -> None:
    """Run the installed command, and print what it prints."""
    terminal = stage.console.is_terminal
    environment = {**os.environ, "COLUMNS": str(stage.console.width - 4)}
    if terminal:
        environment |= {"FORCE_COLOR": "1"}
    done = subprocess.run(
        [TOOL, *words], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    stage.say(f"[bold]$ holdfast {' '.join(words)}")
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    for line in lines[:rows]:
        stage.console.print(Padding(Text.from_ansi(line), (0, 0, 0, 4), expand=False))
    if len(lines) > rows:
        stage.say(f"  [dim]... and {len(lines) - rows} more lines")
    stage.check(done.returncode == code, f"exit code {code}")
    stage.console.print()


def show(stage: Stage, plan: Plan, work: Path) -> None:
    a, b = work / "run-a", work / "run-b"
    with stage.part(
        "Undisturbed",
        f"A run of {plan.steps} steps, saved every {plan.every} steps"
        " while training goes on, as the measure for all that follows.",
    ):
        undisturbed(stage, plan, a)
    with stage.part(
        "Killed",
        "The same run in another folder, until it is killed in the middle of a"
        " save: a snapshot exists whole, or not at all.",
    ):
        folder = killed(stage, plan, b)
    with stage.part(
        "Resumed",
        "The same command again: it goes on from the newest version, and ends"
        " as if nothing had happened.",
    ):
        resumed(stage, plan, a, b, folder)
    with stage.part(
        "Damaged",
        "One bit of the newest version is flipped on the disk: resume says so"
        " and takes the version before, on a new branch.",
    ):
        damaged(stage, plan, a, b)
    with stage.part(
        "Looked into",
        "What lies in the second run now, as the commands tell it; the last one removes what the"
        " killed save left.",
    ):
        command(stage, work, ["ls", "run-b"], 0)
        command(stage, work, ["show", f"run-b/version_{plan.steps}.1"], 0)
        command(stage, work, ["verify", "run-b"], 3)
        command(stage, work, ["sweep", "run-b", "--grace", "0s"], 0)
    with stage.part("Compared", "The same state saved with torch.save and with safetensors."):
        against(stage, plan, a, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the folder with the two runs")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = min(console.width, 100)
    stage = Stage(console)
    began = time.perf_counter()
    about = f"PyTorch {torch.__version__}, {os.cpu_count()} cores"
    stage.say(f"[bold]Holdfast {version('holdfast')}[/], {about}", 0)
    work = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        show(stage, QUICK if options.quick else Plan(), work)
    except (Broken, HoldfastError) as e:
        if str(e) not in stage.failed:
            stage.check(False, escape(str(e)))
    finally:
        if options.keep:
            stage.say(f"kept: {work}", 0)
        else:
            shutil.rmtree(work)
    return stage.end(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
