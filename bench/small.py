"""Topic 3: two thousand tensors of 64 bytes, which measure only overhead."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench import disk, fresh_process
from bench.report import Options, Section, judge, spread

OPERATIONS = ("durable save", "save without fsync", "load")
PAIRED_LIBRARIES = ["limpet", "safetensors"]
Times = dict[str, dict[str, list[float]]]


def measure(names: list[str], folder: str, seconds: float) -> Times:
    """Return the milliseconds of each warm save and load of each of ``names``, in turn.

    Runs in a child process.
    """
    from bench import libraries, states

    warnings.simplefilter("ignore")
    state = states.small_state()
    into = states.blank_like(state)
    found: Times = {name: {what: [] for what in OPERATIONS} for name in names}

    def timed(name: str, what: str, place: Path) -> None:
        one, start = libraries.LIBRARIES[name], time.perf_counter()
        if what == "load":
            one.load(into, place)
        else:
            one.save(state, place)
        if what == "durable save" and not one.durable:
            disk.fsync_tree(place)
        found[name][what].append((time.perf_counter() - start) * 1000)

    for name in names:  # warm up imports and caches; later loads read this file
        libraries.LIBRARIES[name].save(state, Path(folder) / name)
        libraries.LIBRARIES[name].load(into, Path(folder) / name)
    end, repeats = time.perf_counter() + seconds * len(names), 0
    while repeats < 2 or time.perf_counter() < end:
        for name in names:
            for what in OPERATIONS[:1] if libraries.LIBRARIES[name].durable else OPERATIONS[:2]:
                place = Path(folder) / f"{name}-{repeats}"
                timed(name, what, place)
                disk.remove(place)
            timed(name, "load", Path(folder) / name)
        repeats += 1
    if any(not value.equal(into[key]) for key, value in state.items()):
        raise ValueError("loaded tensors have wrong values")
    return found


def sections(options: Options) -> list[Section]:
    from bench.libraries import LIBRARIES

    found: Times = {name: defaultdict(list) for name in LIBRARIES}
    ratios: dict[str, list[float]] = defaultdict(list)
    missing: dict[str, str] = {}
    # Limpet and safetensors alternate in one process; otherwise, their ratio is not stable.
    teams = [PAIRED_LIBRARIES, *([name] for name in LIBRARIES if name not in PAIRED_LIBRARIES)]
    for number in range(options.rounds):
        for team in [*teams[number:], *teams[:number]] if number < 2 else [PAIRED_LIBRARIES]:
            taken = _measure(team, options, missing)
            for name, times in taken.items():
                for what, values in times.items():
                    if values:
                        found[name][what].append(median(values))
            if set(PAIRED_LIBRARIES) <= set(taken):
                for label, (theirs, own) in _COMPARED.items():
                    pairs = zip(
                        taken[PAIRED_LIBRARIES[1]][theirs],
                        taken[PAIRED_LIBRARIES[0]][own],
                        strict=False,
                    )
                    ratios[label].append(median(their / our for their, our in pairs))
    verdicts = [
        judge(label, ratios[label], least=None if "without" in label else 1) for label in _COMPARED
    ]
    order = sorted(
        (name for name in found if found[name].get(OPERATIONS[0])),
        key=lambda name: median(found[name][OPERATIONS[0]]),
    )
    rows = [
        [name, *(cell for what in OPERATIONS for cell in _cells(found[name].get(what, [])))]
        for name in order
    ]
    text = (
        "In one warm process: medians in milliseconds, with the lowest and highest of the rounds."
        " Each save uses a new name. Loads go from the page cache into live tensors."
    )
    columns = ["", *(cell for what in OPERATIONS for cell in (f"{what}, ms", "range"))]
    title = "2,000 tensors of 64 bytes"
    return [Section(title, text, verdicts, columns, rows, list(missing.values()))]


# The compared operations: of safetensors, then of Limpet, whose save is always durable.
_COMPARED = {
    "durable save: speed / safetensors with fsync": ("durable save", "durable save"),
    "durable save: speed / safetensors without fsync": ("save without fsync", "durable save"),
    "load: speed / safetensors": ("load", "load"),
}


def _measure(names: list[str], options: Options, missing: dict[str, str]) -> Times:
    """Measure ``names`` in one child process; if it fails, measure each in its own process.

    Libraries that fail alone go to ``missing``.
    """
    names = [name for name in names if name not in missing]
    place = options.folder / "small"
    place.mkdir()
    try:
        seconds = 0.5 if options.quick else 1.0
        return fresh_process.call(
            "bench.small:measure", names=names, folder=str(place), seconds=seconds
        ) if names else {}  # fmt: skip
    except fresh_process.MeasurementFailed as failure:
        if len(names) == 1:
            missing[names[0]] = f"{names[0]}: {failure}"
            return {}
    finally:
        disk.remove(place)
    return {
        name: times for each in names for name, times in _measure([each], options, missing).items()
    }


def _cells(values: list[float]) -> list[str]:
    return [f"{median(values):.1f}", spread(values, 1)] if values else ["-", "-"]
