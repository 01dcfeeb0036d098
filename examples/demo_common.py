"""Helpers of the demos: output with checks, and training in a process that can be killed."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import limpet

EXAMPLES = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("limpet")
MAX_ATTEMPTS = 5


class CheckFailed(Exception):
    """A check failed that all later checks depend on."""


@dataclass
class CheckLog:
    """Prints the demo, and counts its checks."""

    console: Console
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    section_count: int = 0

    @contextmanager
    def section(self, title: str, sentence: str) -> Iterator[None]:
        self.section_count += 1
        began = time.perf_counter()
        self.console.print()
        self.console.rule(f"[bold cyan]{self.section_count}  {title}", align="left", style="cyan")
        self.console.print(sentence, style="italic")
        self.console.print()
        yield
        self.console.print(f"  [dim]{time.perf_counter() - began:.1f} s")

    def write(self, text: str, indent: int = 2) -> None:
        self.console.print(Padding(text, (0, 0, 0, indent), expand=False))

    def check(self, passed: bool, claim: str, *, required: bool = False) -> None:
        """Print a claim with a mark that shows if it passed.

        Raises ``CheckFailed`` if a ``required`` check failed.
        """
        line = Table.grid(padding=(0, 1))
        line.add_row("[green]✓[/]" if passed else "[bold red]✗[/]", claim)
        self.console.print(Padding(line, (0, 0, 0, 2), expand=False))
        if passed:
            self.passed += 1
            return
        self.failed.append(claim)
        self.write("[bold red]This check failed.", 4)
        if required:
            raise CheckFailed(claim)

    def finish(self, seconds: float) -> int:
        """Print the number of checks, and return the exit code."""
        self.console.print()
        if self.failed:
            checks = self.passed + len(self.failed)
            self.write(f"[bold red]{len(self.failed)} of {checks} checks failed.")
            return 1
        self.write(f"[bold green]All {self.passed} checks passed[/] in {seconds:.0f} s.")
        return 0


@dataclass(frozen=True)
class TrainingSize:
    """Number of epochs, steps of an epoch and between saves, size of a batch, options of the model,
    and rounds of the comparison."""

    epochs: int = 3
    epoch: int = 40
    every: int = 20
    batch: int = 4
    model: tuple[str, ...] = ()
    rounds: int = 7

    @property
    def steps(self) -> int:
        return self.epochs * self.epoch

    @property
    def kill_after(self) -> int:
        """The kill hits a save after this step."""
        return self.steps // 2 // self.every * self.every


QUICK = TrainingSize(
    epochs=2, epoch=20, every=8, batch=2, model=("--layers", "4", "--length", "32"), rounds=3
)


@dataclass
class TrainingResult:
    """The exit code, duration, and output of a training process."""

    code: int = 0
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    warnings: str = ""

    def find_line(self, beginning: str) -> str:
        return next((line for line in self.lines if line.startswith(beginning)), "")


def run_training(
    log: CheckLog,
    size: TrainingSize,
    run: str,
    watch: Callable[[subprocess.Popen[str]], None] | None = None,
) -> TrainingResult:
    """Run ``train.py`` until it ends, with a progress bar; ``watch`` may end it earlier."""
    command = [sys.executable, str(EXAMPLES / "train.py"), "--run", run, "--log", "2"]
    command += ["--epochs", str(size.epochs), "--windows", str(size.epoch * size.batch)]
    command += ["--batch", str(size.batch), "--every", str(size.every), *size.model]
    columns = (TextColumn("  {task.description}"), BarColumn(40), TextColumn("{task.fields[loss]}"))
    result = TrainingResult()
    began = time.perf_counter()
    with (
        Progress(
            *columns,
            console=log.console,
            transient=True,
            disable=not log.console.is_terminal,
        ) as bar,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        task = bar.add_task(f"training {name_of(run)}", total=size.steps, loss="")

        def read_output() -> None:
            for line in process.stdout or ():
                result.lines.append(line.rstrip())
                if match := re.match(r"step +(\d+)  (loss .*)", line):
                    bar.update(
                        task, completed=int(match[1]), loss=f"step {match[1]:>3}  {match[2]}"
                    )

        reader = Thread(target=read_output)
        reader.start()
        try:
            if watch is not None:
                watch(process)
            result.code = process.wait()
        finally:
            process.kill()
            reader.join()
        errors.seek(0)
        result.warnings = errors.read()
    result.seconds = time.perf_counter() - began
    if result.code not in (0, -signal.SIGKILL):
        log.console.print(escape(result.warnings))
    return result


def kill_in_save(run: str, after: int) -> Callable[[subprocess.Popen[str]], None]:
    """Return a watcher that sends SIGKILL while a shard of a later step is being written."""

    def watch(process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            if any(step_of(key.partition("/")[0]) > after for key in unfinished_shards(run)):
                process.send_signal(signal.SIGKILL)
                return
            time.sleep(0.0005)

    return watch


def unfinished_shards(run: str) -> list[str]:
    """Return the keys of the shards that are being written. In a folder, these are temporary files,
    which count once they have their first bytes; in S3, unfinished uploads."""
    keys = [stat.key for stat in limpet.open_store(run).partials("")]
    shards = [key for key in keys if key.startswith("version_") and "shard-" in key]
    return [key for key in shards if "://" in run or has_data(Path(run, key))]


def has_data(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return any(file.read(8))
    except FileNotFoundError:  # the file has been renamed in the meantime
        return False


def written_bytes(path: Path) -> int:
    """Return the bytes in blocks that are not all zeros: an estimate of what was written.

    The file has its full length from the start, so its size does not show how much was written.
    """
    blocks = np.fromfile(path, np.uint8)
    blocks = np.pad(blocks, (0, -len(blocks) % 4096)).reshape(-1, 4096)
    return min(int(blocks.any(axis=1).sum()) * 4096, path.stat().st_size)


def version_folders(run: str) -> list[str]:
    """Return the names of the versions and of the saves that never became one, oldest first."""
    store = limpet.open_store(run)
    keys = [stat.key for stat in (*store.list(""), *store.partials(""))]
    return sorted({k.partition("/")[0] for k in keys if k.startswith("version_")}, key=step_of)


def step_of(folder: str) -> int:
    return int(folder.removeprefix("version_").partition(".")[0])


def name_of(run: str) -> str:
    """Return the last level of a path or URL."""
    return run.rpartition("/")[2]


def files_of(run: str, folder: str) -> list[str]:
    """Return the keys of the files of a version."""
    return [stat.key for stat in limpet.open_store(run).list(folder)]
