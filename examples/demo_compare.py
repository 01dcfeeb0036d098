"""The comparisons of the demo: two runs bit for bit, and Limpet with other ways to save."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from demo_common import CheckFailed, CheckLog, TrainingSize
from rich.markup import escape
from rich.table import Table

import limpet
from limpet.errors import FormatError


@dataclass
class Comparison:
    """The result of a comparison of one part of the state."""

    tensors: int = 0
    nbytes: int = 0
    values: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, a: Any, b: Any, key: str) -> None:
        """Compare two states recursively; tensors byte by byte, which also compares NaNs."""
        if type(a) is not type(b):
            self.differences.append(f"{key}: {type(a).__name__} and {type(b).__name__}")
        elif isinstance(a, dict):
            if list(a) != list(b):
                self.differences.append(f"{key}: different members")
            for name in a.keys() & b.keys():
                self.compare(a[name], b[name], f"{key}/{name}")
        elif isinstance(a, list | tuple):
            if len(a) != len(b):
                self.differences.append(f"{key}: {len(a)} and {len(b)} members")
            for i, (x, y) in enumerate(zip(a, b, strict=False)):
                self.compare(x, y, f"{key}/{i}")
        elif isinstance(a, torch.Tensor | np.ndarray):
            x, y = np.asarray(a), np.asarray(b)
            same = x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
            self.tensors, self.nbytes = self.tensors + 1, self.nbytes + x.nbytes
            if not same:
                self.differences.append(key)
        else:
            self.values += 1
            if repr(a) != repr(b):  # repr shows every bit of a float
                self.differences.append(f"{key}: {a!r} and {b!r}")


def compare_runs(log: CheckLog, a: str, b: str) -> None:
    """Load the newest version of both runs, and compare everything in them."""
    newest = [limpet.Run(run).latest() for run in (a, b)]
    if newest[0] is None or newest[1] is None:
        raise CheckFailed("both runs have versions")
    states = [limpet.load(snapshot.url) for snapshot in newest if snapshot is not None]
    same_parts = list(states[0]) == list(states[1])
    log.check(same_parts, "the two states have the same parts", required=True)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  compared")
    for name in ("tensors", "bytes", "values", "different"):
        table.add_column(name, justify="right")
    total = Comparison()
    for part in states[0]:
        result = Comparison()
        result.compare(states[0][part], states[1][part], part)
        row = (result.tensors, result.nbytes, result.values, len(result.differences))
        table.add_row(f"  {part}", *(f"{n:,}" for n in row))
        total.tensors += result.tensors
        total.nbytes += result.nbytes
        total.values += result.values
        total.differences += result.differences
    log.console.print()
    log.console.print(table)
    log.console.print()
    for difference in total.differences[:5]:
        log.write(f"[red]different:[/] {escape(difference)}")
    names = " and ".join("/".join(s.url.split("/")[-2:]) for s in newest if s)
    log.check(
        not total.differences and total.nbytes > 0,
        f"{names}: all {total.tensors} tensors ({total.nbytes:,} bytes) and"
        f" {total.values:,} plain values are equal, bit for bit",
    )


def flip_bit(path: Path) -> str:
    """Flip one bit in the middle of a file, as a failing disk might; return a description."""
    at = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 0x10]))
    return f"byte {at:,} of {path.stat().st_size:,}: {old:08b} is now {old ^ 0x10:08b}"


def flip_stored_bit(run: str, key: str) -> str:
    """Flip one bit in the middle of a file of a run; return a description."""
    if "://" not in run:
        return flip_bit(Path(run, key))
    store = limpet.open_store(run)
    length = store.stat(key).length
    data, at = bytearray(store.get(key, length)), length // 2
    old = data[at]
    data[at] ^= 0x10
    store.delete(key)
    with store.put(key, length) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit()
    return f"byte {at:,} of {length:,}: {old:08b} is now {data[at]:08b}"


def fsync_file(path: Path) -> None:
    """Make a written file durable: fsync the file, and the folder that contains its name."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def iter_tensors(value: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and arrays of a state by key: everything that safetensors can save."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield from iter_tensors(member, f"{key}/{name}")
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            yield from iter_tensors(member, f"{key}/{i}")
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield key, torch.as_tensor(value)


def save_limpet(state: dict[str, Any], path: Path) -> Path:
    limpet.save(path, state)
    return next(path.glob("shard-*.safetensors"))


def save_torch(state: dict[str, Any], path: Path) -> Path:
    torch.save(state, path)
    fsync_file(path)
    return path


def save_safetensors(state: dict[str, Any], path: Path) -> Path:
    safetensors.torch.save_file(dict(iter_tensors(state)), path)
    fsync_file(path)
    return path


def detects_damage(load: Callable[[Path], Any], path: Path) -> bool:
    """Return True if loading the damaged file raises an error."""
    try:
        load(path)
    except (FormatError, RuntimeError, safetensors.SafetensorError):
        return True
    return False


SAVERS: dict[str, tuple[Callable[[dict[str, Any], Path], Path], Callable[[Path], Any]]] = {
    "limpet.save": (save_limpet, limpet.load),
    "torch.save": (save_torch, lambda p: torch.load(p, weights_only=False)),
    "safetensors": (save_safetensors, safetensors.torch.load_file),
}


def compare_savers(log: CheckLog, size: TrainingSize, run: str, work: Path) -> None:
    """Time each way to save, and check if loading detects a flipped bit."""
    newest = limpet.Run(run).latest()
    if newest is None:
        raise CheckFailed("run-a has versions")
    state = limpet.load(newest.url)
    seconds: dict[str, list[float]] = {name: [] for name in SAVERS}
    sizes, detected = {}, {}
    for round_number in range(size.rounds + 1):  # round 0 is a warm-up and is not timed
        for name, (saver, load) in SAVERS.items():
            path = work / f"{saver.__name__}-{round_number}"
            began = time.perf_counter()
            file = saver(state, path)
            if round_number:
                seconds[name].append(time.perf_counter() - began)
            files = list(path.iterdir()) if path.is_dir() else [path]
            sizes[name] = sum(f.stat().st_size for f in files)
            if round_number == size.rounds:
                flip_bit(file)
                detected[name] = detects_damage(load, path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  saved by")
    for title in ("median", "fastest", "slowest", "bytes"):
        table.add_column(title, justify="right")
    table.add_column("load of a flipped bit")
    for name, times in seconds.items():
        cells = [f"{t * 1e3:.0f} ms" for t in (statistics.median(times), min(times), max(times))]
        outcome = "[green]raises an error" if detected[name] else "[red]no error"
        table.add_row(f"  {name}", *cells, f"{sizes[name]:,}", outcome)
    log.console.print(table, highlight=False)
    log.console.print()
    log.write(
        f"[dim]{size.rounds} synchronous saves of each kind, in turn. torch.save and safetensors do"
        " not call fsync, so the demo adds an fsync of the file and of the folder to each save."
        " safetensors saves only tensors, without the plain values of the state."
    )
    log.check(detected["limpet.save"], "limpet.load raises an error for the damaged file")
