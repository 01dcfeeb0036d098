"""Topic 8: incremental and full versions of a large state in which little changes."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_SAVES = 6
_ADAPTER = 4 << 20
MODES = ("full", "incremental")
CASES = {
    "adapter": "frozen base, 4 MiB adapter",
    "embedding": "embedding, 1/64 of it changed per version",
}


def save(folder: str, size: int, case: str, way: str) -> dict[str, list[float]]:
    """Save versions; return their bytes, blocked seconds, and seconds until the commit.

    Runs in a child process.
    """
    import torch

    import limpet
    from bench import states

    state = {"base": states.large_state(size), "adapter": {"a": torch.zeros(_ADAPTER // 4)}}
    tensors = list(state["base"].values())
    found: dict[str, list[float]] = {"bytes": [], "blocked": [], "committed": []}
    with limpet.Checkpointer(
        str(Path(folder) / way),
        state,
        save=limpet.EverySteps(1),
        incremental=10**9 if way == "incremental" else False,
    ) as checkpointer:
        for step in range(_SAVES):
            if case == "adapter":
                state["adapter"]["a"] += 1
            elif step:
                # 1/64 of all rows, in another place each time
                part = size // 64 // 4
                tensor = tensors[step * 3 % len(tensors)]
                tensor[: part % tensor.numel() or tensor.numel()] += 1
            start = time.perf_counter()
            checkpointer.step()
            blocked = time.perf_counter() - start
            snapshot = checkpointer.wait()
            found["committed"].append(time.perf_counter() - start)
            found["blocked"].append(blocked)
            found["bytes"].append(float(snapshot.nbytes if snapshot else 0))
    return found


def load(folder: str, size: int, way: str) -> dict[str, float]:
    """Load the newest version from a cold disk into live tensors; return the seconds.

    Runs in a child process.
    """
    import torch

    import limpet
    from bench import states

    into = {"base": states.blank_large_state(size), "adapter": {"a": torch.ones(_ADAPTER // 4)}}
    snapshot = limpet.Run(str(Path(folder) / way)).latest()
    if snapshot is None:
        raise ValueError("the run has no version to load")
    resident = disk.drop_page_cache(Path(folder) / way)
    start = time.perf_counter()
    limpet.load(snapshot.url, into=into)
    seconds = time.perf_counter() - start
    if resident > 0.01:
        raise ValueError(f"{resident:.0%} of the files stayed in the page cache")
    return {"seconds": seconds}


def _measure(options: Options, case: str) -> tuple[list[list[str]], list[float]]:
    """Return the table rows, and per round the ratio of the incremental to the full load time."""
    folder = str(options.folder)
    rows, seconds = [], {way: list[float]() for way in MODES}
    try:
        saved = {
            way: fresh_process.call(
                "bench.incremental:save", folder=folder, size=options.medium, case=case, way=way
            )
            for way in MODES
        }
        for number in range(max(4, options.rounds)):
            for way in MODES[:: 1 - 2 * (number % 2)]:  # each mode goes first in half of the rounds
                told = fresh_process.call(
                    "bench.incremental:load", folder=folder, size=options.medium, way=way
                )
                seconds[way].append(told["seconds"])
    finally:
        for way in MODES:
            disk.remove(options.folder / way)
    for way in MODES:
        later = {name: values[1:] for name, values in saved[way].items()}
        rows.append(
            [
                f"{CASES[case]}: {way}",
                f"{median(later['bytes']) / 2**20:.1f} MiB",
                f"{1000 * median(later['blocked']):.0f} ms",
                f"{1000 * median(later['committed']):.0f} ms",
                f"{median(seconds[way]):.2f} s",
            ]
        )
    return rows, [a / b for a, b in zip(seconds["incremental"], seconds["full"], strict=True)]


def sections(options: Options) -> list[Section]:
    size = options.medium >> 20
    title = f"Incremental versions of {size} MiB"
    text = (
        "Per version, from the second version on: the bytes written, the time that step() blocks,"
        " and the time until the commit. Also the cold load of the last version. The state consists"
        " of CPU tensors and is saved by a Checkpointer."
    )
    section = Section(title, text, [], ["state", "written", "blocked", "committed", "cold load"])
    for case, state in CASES.items():
        what = f"{state}: cold load, incremental / full"
        try:
            rows, ratios = _measure(options, case)
        except fresh_process.MeasurementFailed as failure:
            section.missing.append(f"{case}: {failure}")
            continue
        section.rows += rows
        section.verdicts.append(judge(what, ratios))
    return [section]
