"""Topic 11: how the cost of each public call grows with what it works on.

Each call runs at three sizes. The exponent is the slope of a line through the logarithms of size
and time: 0 means that the cost is constant, 1 that it grows with its work. Files lie in memory
(where /dev/shm exists), because the growth is that of computation and of the number of file
operations, not of the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import fresh_process
from bench.report import NO, YES, Options, Section, Verdict, judge

SIZES = (1_000, 4_000, 16_000)
QUICK_SIZES = (100, 400, 1_600)
MOST = 1.1
ROUNDS = 3
CACHE_BYTES = 64 << 20
REFERENCE = "json.loads, for comparison"
PATIENCE = 8.0
"""A round that takes longer than this, in seconds, is not repeated."""


@dataclass(slots=True)
class Case:
    """A call to measure. ``before`` runs before each round, outside of the measurement.

    ``call`` does what is measured ``repeats`` times.
    """

    name: str
    call: Callable[[], object]
    before: Callable[[], object] = int
    rounds: int = ROUNDS
    repeats: int = 1


def run_command(*arguments: object) -> Callable[[], object]:
    """Return a call that runs a command of the command line in this process, without its output."""
    from limpet.cli import cli

    def call() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main(args=[str(a) for a in arguments], standalone_mode=False)

    return call


def remover(path: Path) -> Callable[[], object]:
    return lambda: shutil.rmtree(path, ignore_errors=True)


def seconds_of(cases: Sequence[Case], calls: Sequence[int]) -> list[float]:
    """Return the processor time of all threads in the fastest of a few rounds, in seconds per call.

    ``cases``: one call at each size. The sizes take turns, because the speed of a machine changes
    over minutes. ``calls``: the number of calls per round, so many that all sizes work for about as
    long. Otherwise, the fastest of a few short calls is one without a collection of garbage, while
    each long call contains some, so that even the exponent of a loop over N dicts is 1.5.
    Processor time varies less than elapsed time if other processes use the machine.
    """
    caches = np.zeros(CACHE_BYTES, np.uint8)
    best = [math.inf] * len(cases)
    for number in range(max(case.rounds for case in cases)):
        for i, case in enumerate(cases):
            count = max(1, calls[i] // case.repeats) if case.rounds > 1 else 1
            if number == 0 or (number < case.rounds and best[i] * count <= PATIENCE):
                best[i] = min(best[i], sum(processor_times(case, count, caches)) / count)
    return [seconds / case.repeats for seconds, case in zip(best, cases, strict=True)]


def processor_times(case: Case, count: int, caches: np.ndarray[Any, Any]) -> Iterator[float]:
    """Call a case ``count`` times, and yield the processor time of each call in seconds.

    Before each call, an array that is larger than the caches of the processor is changed.
    Otherwise, a repeated short call finds its data in them, which a call in a training does not.
    """
    for _ in range(count):
        case.before()
        caches += 1
        begin = time.process_time()
        case.call()
        yield time.process_time() - begin


# -- what grows -----------------------------------------------------------------------------------


def snapshot_cases(folder: Path, state: dict[str, Any], key: str) -> Iterator[Case]:
    """Yield the calls on one snapshot of ``state``, in which ``key`` is a leaf."""
    import limpet

    snap, new = folder / "snap", folder / "new"
    limpet.save(snap, state, step=1)
    limpet.save(folder / "other", state, step=2)
    run_command("export", snap, folder / "out", "--to", "safetensors", "--root", "/")()

    def open_and_list() -> None:
        limpet.open(snap).keys()

    yield Case("save", lambda: limpet.save(new, state, step=1), remover(new))
    yield Case("save_async", lambda: limpet.save_async(new, state).wait(), remover(new))
    yield Case("load", lambda: limpet.load(snap))
    yield Case("load into the state", lambda: limpet.load(snap, into=state))
    yield Case("load of one leaf", lambda: limpet.load(snap, keys=key))
    yield Case("open, keys", open_and_list)
    yield Case("verify", lambda: limpet.open(snap).verify())
    for verb in ("show", "verify"):
        yield Case(f"limpet {verb}", run_command(verb, snap))
    yield Case("limpet diff", run_command("diff", snap, folder / "other"))
    yield Case("limpet copy", run_command("copy", snap, new), remover(new))
    yield Case("limpet reshard", run_command("reshard", snap, new, "--shards", "4"), remover(new))
    for kind in ("safetensors", "torch", "hf"):
        command = run_command("export", snap, new, "--to", kind, "--root", "/")
        yield Case(f"limpet export --to {kind}", command, remover(new))
    command = run_command("import", folder / "out" / "model.safetensors", new, "--step", "1")
    yield Case("limpet import", command, remover(new))


def training_cases(folder: Path, state: dict[str, Any]) -> Iterator[Case]:
    """Yield the calls of a training with ``state``."""
    import limpet

    run, never = folder / "run", limpet.EverySteps(10**9)

    def start(save: Any = never, **options: Any) -> limpet.Checkpointer:
        shutil.rmtree(run, ignore_errors=True)
        ckpt = limpet.Checkpointer(run, state, save=save, **options).__enter__()
        ckpt.step()
        return ckpt

    yield Case("Checkpointer", lambda: limpet.Checkpointer(run, state, save=never).close())
    ckpt = start()
    yield Case("step", ckpt.step)
    yield Case("Checkpointer.save", ckpt.save, ckpt.step)
    ckpt.close()
    ckpt = start(incremental=True)
    yield Case("Checkpointer.save, incremental", ckpt.save, ckpt.step)
    ckpt.close()
    ckpt = start(never | limpet.OnException())
    yield Case("step, OnException", ckpt.step)
    ckpt.save()
    ckpt.close()
    resumed = limpet.Checkpointer(run, state, save=never)
    yield Case("resume", resumed.resume)
    resumed.close()


def leaves(count: int, folder: Path) -> Iterator[Case]:
    """``count`` arrays of 64 bytes in nested dicts."""
    raw = json.dumps([{"key": f"leaf{i}", "tensor": ["float64", [8]]} for i in range(8 * count)])
    yield Case(REFERENCE, lambda: json.loads(raw))
    state = {
        "leaves": {f"part{i // 10}": {} for i in range(0, count, 10)},
        "more": [0.5] * count,
    }
    for i in range(count):
        state["leaves"][f"part{i // 10}"][f"leaf{i}"] = np.full(8, i, np.float64)
    yield from snapshot_cases(folder, state, "leaves/part1/leaf11")
    yield from training_cases(folder, state)


def parameters(count: int, folder: Path) -> Iterator[Case]:
    """``count`` parameters of 64 bytes with AdamW, half of them in one group each."""
    import torch

    model = torch.nn.Module()
    for i in range(count // 2):
        model.add_module(f"layer{i}", torch.nn.Linear(4, 4))
    each = list(model.parameters())
    groups = [{"params": each[: count // 2]}, *({"params": [p]} for p in each[count // 2 :])]
    optimizer = torch.optim.AdamW(groups)
    for parameter in each:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    yield from snapshot_cases(folder, state, "model/layer1.weight")
    yield from training_cases(folder, state)


def versions(count: int, folder: Path) -> Iterator[Case]:
    """A run of ``count`` versions."""
    import limpet
    from limpet.run.retention import VERSIONS_PER_SAVE

    path, new = folder / "run", folder / "new"
    state = {"x": np.zeros(8), "progress": limpet.Progress()}
    make_run(path, count, state)
    run = limpet.Run(path)

    def fresh() -> limpet.Run:
        return limpet.Run(path)

    policies = {
        "all kept": None,
        "KeepLast": limpet.KeepLast(count),
        "KeepLast, KeepBest": limpet.KeepLast(count) | limpet.KeepBest(count // 2, "loss"),
    }
    for name, keep in policies.items():
        saving = limpet.Checkpointer(path, state, save=limpet.Never(), keep=keep)
        saving.resume()

        def save(number: int, saving: limpet.Checkpointer = saving) -> None:
            for _ in range(number):
                saving.step({"loss": 1.0})
                saving.save()

        save(1)  # reads all manifests
        # after so many saves, the one with retention included, their mean is that of all
        repeats = max(1, count // VERSIONS_PER_SAVE)
        yield Case(f"Checkpointer.save, {name}", partial(save, repeats), repeats=repeats)
        saving.close()
    resumed = limpet.Checkpointer(path, state)
    yield Case("resume", resumed.resume)
    resumed.close()
    yield Case("Run.latest", lambda: fresh().latest())
    yield Case("Run.snapshots", lambda: fresh().snapshots())
    yield Case("Run.best", lambda: fresh().best("loss"))
    yield Case("Run.metrics", lambda: fresh().metrics(count))
    yield Case("Run.add_metrics", lambda: run.add_metrics(count, {"loss": 1.0}))
    yield Case("Run.pin", lambda: fresh().pin(count))
    yield Case("Run.unpin", lambda: fresh().unpin(count), lambda: fresh().pin(count))
    yield Case("Run.retain", lambda: fresh().retain(limpet.KeepLast(count + 100)))
    yield Case("Run.sweep", lambda: fresh().sweep())
    yield Case("limpet show RUN@latest", run_command("show", f"{path}@latest"))
    yield Case("limpet ls", run_command("ls", path))
    yield Case("limpet verify", run_command("verify", path))
    yield Case("limpet copy", run_command("copy", path, new), remover(new))
    oldest = iter(run.line())
    yield Case("Run.delete", lambda: run.delete(next(oldest)))
    last = Case("Run.retain that deletes all but 3", lambda: fresh().retain(limpet.KeepLast(3)))
    last.rounds = 1
    yield last


def make_run(path: Path, count: int, state: dict[str, Any]) -> None:
    """Make a run of ``count`` versions with hard links to the files of one."""
    import msgspec

    import limpet
    from limpet.format import names
    from limpet.format.manifest import decode_manifest
    from limpet.format.sealed import seal

    first = path / "version_1"
    with limpet.Checkpointer(path, state, save=limpet.EverySteps(1)) as ckpt:
        ckpt.step({"loss": 0.5})
    raw = (first / names.MANIFEST).read_bytes()
    manifest, _ = decode_manifest(raw, names.MANIFEST)
    for step in range(2, count + 1):
        folder = path / f"version_{step}"
        folder.mkdir()
        for shard in manifest.shards:
            for name in (shard.name, shard.index.name):
                os.link(first / name, folder / name)
        raw, _ = seal(msgspec.structs.replace(manifest, step=step))
        (folder / names.MANIFEST).write_bytes(raw)


def files(count: int, folder: Path) -> Iterator[Case]:
    """``count`` files of other programs in the run, half of them in a folder of their own."""
    import limpet

    path = folder / "run"
    (path / "wandb").mkdir(parents=True)
    for i in range(count // 2):
        (path / f"log-{i}.txt").touch()
        (path / "wandb" / f"{i}.json").touch()
    state = {"x": np.zeros(8)}
    saving = limpet.Checkpointer(path, state, save=limpet.EverySteps(10**9),
                                   keep=limpet.KeepLast(3))  # fmt: skip
    saving.step()
    yield Case("Checkpointer.save", saving.save, saving.step)
    saving.close()
    resumed = limpet.Checkpointer(path, state)
    yield Case("resume", resumed.resume)
    resumed.close()
    run = limpet.Run(path)
    yield Case("Run.latest", run.latest)
    yield Case("Run.retain", lambda: limpet.Run(path).retain(limpet.KeepLast(3)))
    yield Case("Run.sweep", run.sweep)
    yield Case("limpet ls", run_command("ls", path))


def ranks(count: int, folder: Path) -> Iterator[Case]:
    """Plans of ``count`` ranks for 16 leaves, and a snapshot with ``count`` shards."""
    import limpet
    from bench.million_boxes import make_leaf_boxes
    from limpet.layout.global_plan import can_reuse_plan, make_global_plan
    from limpet.layout.local_plan import LocalPlan, make_local_plan

    raw = [make_local_plan(make_leaf_boxes(r, count, 16)).to_bytes() for r in range(count)]
    plan = make_global_plan([LocalPlan.from_bytes(r) for r in raw])
    yield Case("global plan", lambda: make_global_plan([LocalPlan.from_bytes(r) for r in raw]))
    yield Case("unchanged plan", lambda: can_reuse_plan([r[:16] for r in raw], plan))

    snap, new = folder / "snap", folder / "new"
    state = {"x": np.zeros((count, 8)), "y": np.zeros((count, 2), np.int32)}
    limpet.save(folder / "one", state, step=1)
    run_command("reshard", folder / "one", snap, "--shards", count)()
    command = run_command("reshard", folder / "one", new, "--shards", count)
    yield Case("limpet reshard to N shards", command, remover(new))
    yield Case("load", lambda: limpet.load(snap, into=state))
    yield Case("load of one row", lambda: limpet.open(snap)["x"][count // 2 : count // 2 + 1])
    yield Case("verify", lambda: limpet.open(snap).verify())
    yield Case("limpet show", run_command("show", snap, "--layout"))
    yield Case("limpet copy", run_command("copy", snap, new), remover(new))
    command = run_command("reshard", snap, new, "--shards", "4")
    yield Case("limpet reshard to 4 shards", command, remover(new))
    command = run_command("export", snap, new, "--to", "safetensors", "--root", "/")
    yield Case("limpet export", command, remover(new))


DIMENSIONS = {
    "leaves": leaves, "parameters": parameters, "versions": versions, "files": files,
    "ranks": ranks,
}  # fmt: skip


def measure(folder: str, dimension: str, sizes: list[int]) -> dict[str, list[float]]:
    """Return the seconds of each call at each size. Runs in a child process."""
    places = [Path(folder) / str(size) for size in sizes]
    for place in places:
        place.mkdir()
    each = map(DIMENSIONS[dimension], sizes, places)
    calls = [max(sizes) // size for size in sizes]
    return {cases[0].name: seconds_of(cases, calls) for cases in zip(*each, strict=True)}


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of the line of least squares through the logarithms."""
    slope, _ = np.polyfit(np.log(sizes), np.log(np.maximum(seconds, 1e-7)), 1)
    return float(slope)


def sections(options: Options) -> list[Section]:
    sizes = list(QUICK_SIZES if options.quick else SIZES)
    shown = ", ".join(f"{size:,}" for size in sizes)
    section = Section(
        "Growth of cost",
        f"Every public call at {shown} leaves, parameters, versions, files of other programs, and"
        f" ranks: processor time of all threads per call, the least of {ROUNDS} rounds in which the"
        f" sizes take turns (of one round, if it takes over {PATIENCE:.0f} s). Smaller sizes make"
        " more calls per round, and before each call, the processor's caches are overwritten. The"
        f" exponent is the slope of time over size, both as logarithms. Target: at most {MOST} for"
        " every call.",
        [],
        ["call", *(f"{size:,}" for size in sizes), "exponent"],
    )
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else options.folder
    for dimension in DIMENSIONS:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            try:
                found = fresh_process.call("bench.growth:measure", timeout=2400,
                    folder=folder, dimension=dimension, sizes=sizes)  # fmt: skip
            except fresh_process.MeasurementFailed as failure:
                section.missing.append(f"{dimension}: {failure}")
                section.verdicts.append(judge(f"largest exponent, {dimension}", [], most=MOST))
                continue
        exponents = {name: exponent(sizes, seconds) for name, seconds in found.items()}
        worst = max(exponents.keys() - {REFERENCE}, key=exponents.__getitem__)
        section.verdicts.append(
            Verdict(
                f"largest exponent, {dimension}",
                f"at most {MOST}",
                f"{exponents[worst]:.2f}",
                worst,
                YES if exponents[worst] <= MOST else NO,
            )
        )
        for name, seconds in found.items():
            times = [f"{1e3 * each:,.1f} ms" for each in seconds]
            section.rows.append([f"{dimension}: {name}", *times, f"{exponents[name]:.2f}"])
    return [section]
