"""Topic 4: how long a saving ``Checkpointer.step`` blocks training, compared with one memcpy."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_REPEATS = 8


def measure(folder: str, size: int) -> dict[str, list[float]]:
    """Alternate between steps that save and memcpy; return the seconds of each.

    Runs in a child process. memcpy runs with each of several thread counts.
    """
    import limpet
    from bench import states
    from limpet.settings import read_settings

    state = states.large_state(size)
    memcpy = states.memcpy_of(state)
    teams = {"same": read_settings().threads, "cores": len(os.sched_getaffinity(0)), "one": 1}
    found: dict[str, list[float]] = {name: [] for name in [*teams, "step"]}
    with limpet.Checkpointer(
        str(Path(folder) / "run"),
        {"model": state},
        save=limpet.EverySteps(1),
        keep=limpet.KeepLast(2),
    ) as checkpointer:
        for _ in range(_REPEATS + 1):
            for name, threads in teams.items():
                found[name].append(memcpy(threads))
            start = time.perf_counter()
            checkpointer.step()
            found["step"].append(time.perf_counter() - start)
            checkpointer.wait()
    return {
        **{name: values[1:] for name, values in found.items()},
        "first": found["step"][:1],
        "threads": [float(teams["same"]), float(teams["cores"])],
    }


def measure_many_leaves(folder: str, parameters: int) -> dict[str, list[float]]:
    """Return the seconds that steps block that save a model of many small parameters, with AdamW,
    and the seconds that the rest of each save takes in the background while nothing else runs.

    Runs in a child process. A training step runs before each.
    """
    import torch

    import limpet

    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(parameters // 2))
    optimizer = torch.optim.AdamW(model.parameters())
    blocked, background = [], [0.0]
    with limpet.Checkpointer(
        str(Path(folder) / "run"),
        {"model": model, "optimizer": optimizer},
        save=limpet.EverySteps(1),
        keep=limpet.KeepLast(2),
    ) as checkpointer:
        for _ in range(_REPEATS + 1):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            start = time.perf_counter()
            checkpointer.step()
            blocked.append(time.perf_counter() - start)
            checkpointer.wait()
            background.append(checkpointer.statistics()["background_seconds"])
    return {
        "first": blocked[:1],
        "later": blocked[1:],
        "background": np.diff(background)[1:].tolist(),
    }


def many_leaves_section(options: Options) -> Section:
    parameters = 1_000 if options.quick else 12_500
    title = f"Asynchronous save, {4 * parameters:,} leaves: time that step() blocks"
    text = (
        f"The leaves are {parameters:,} parameters and their AdamW slots, of 4 to 256 bytes. A"
        " training step runs before each save. The cost is that of finding and describing the"
        " leaves. From the second save on, the layout of the shard is known."
    )
    found: dict[str, list[float]] = {"first": [], "later": [], "background": []}
    missing = []
    try:
        found = fresh_process.call(
            "bench.blocked:measure_many_leaves", folder=str(options.folder), parameters=parameters
        )
    except fresh_process.MeasurementFailed as failure:
        missing.append(f"limpet: {failure}")
    finally:
        disk.remove(options.folder / "run")
    verdicts = [
        judge("step() that saves, from the second save on", found["later"], most=0.4, unit="s"),
        judge("the first step() that saves", found["first"], unit="s"),
        judge("the rest of a save, in the background", found["background"], unit="s"),
    ]
    return Section(title, text, verdicts, missing=missing)


def sections(options: Options) -> list[Section]:
    title = f"Asynchronous save, {options.medium >> 20} MiB of CPU tensors: time that step() blocks"
    text = (
        "Measured from the second save on. The baseline is one copy of the same state into touched"
        " memory in 8 MiB pieces, with as many threads as the library uses. Both alternate in one"
        " process."
    )
    what = "blocked / memcpy with as many threads"
    try:
        found = fresh_process.call(
            "bench.blocked:measure", folder=str(options.folder), size=options.medium
        )
    except fresh_process.MeasurementFailed as failure:
        failed = Section(title, text, [judge(what, [], most=1.2)], missing=[f"limpet: {failure}"])
        return [failed, many_leaves_section(options)]
    finally:
        disk.remove(options.folder / "run")
    same, cores = (int(each) for each in found["threads"])
    ratios = [a / b for a, b in zip(found["step"], found["same"], strict=True)]
    milliseconds = {name: [1000 * each for each in found[name]] for name in found}
    reported = {
        "step() that saves": "step",
        "the first step() that saves": "first",
        f"memcpy, {same} threads": "same",
        f"memcpy, {cores} threads (one per core)": "cores",
        "memcpy, 1 thread": "one",
    }
    verdicts = [judge(what, ratios, most=1.2)]
    verdicts += [
        judge(label, milliseconds[name], unit="ms", digits=0) for label, name in reported.items()
    ]
    return [Section(title, text, verdicts), many_leaves_section(options)]
