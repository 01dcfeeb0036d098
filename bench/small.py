"""Topic 3: two thousand tensors of 64 bytes, where nothing but overhead is left to measure."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench import child, disk
from bench.report import Options, Section, judge, spread

WHATS = ("durable save", "save as it is", "load")
RIVALS = ["holdfast", "safetensors"]
Times = dict[str, dict[str, list[float]]]


def measure(names: list[str], folder: str, seconds: float) -> Times:
    """In a child, warm: milliseconds of each save and load of each of ``names``, in turn."""
    from bench import peers, states

    warnings.simplefilter("ignore")
    state = states.small()
    into = states.blank(state)
    found: Times = {name: {what: [] for what in WHATS} for name in names}

    def timed(name: str, what: str, place: Path) -> None:
        one, start = peers.ALL[name], time.perf_counter()
        if what == "load":
            one.load(into, place)
        else:
            one.save(state, place)
        if what == "durable save" and not one.durable:
            disk.fsync_tree(place)
        found[name][what].append((time.perf_counter() - start) * 1000)

    for name in names:  # imports and caches; what is saved here is loaded again and again
        peers.ALL[name].save(state, Path(folder) / name)
        peers.ALL[name].load(into, Path(folder) / name)
    end, repeats = time.perf_counter() + seconds * len(names), 0
    while repeats < 2 or time.perf_counter() < end:
        for name in names:
            for what in WHATS[:1] if peers.ALL[name].durable else WHATS[:2]:
                place = Path(folder) / f"{name}-{repeats}"
                timed(name, what, place)
                disk.remove(place)
            timed(name, "load", Path(folder) / name)
        repeats += 1
    if any(not value.equal(into[key]) for key, value in state.items()):
        raise ValueError("tensors came back wrong")
    return found


def sections(options: Options) -> list[Section]:
    from bench.peers import ALL

    found: Times = {name: defaultdict(list) for name in ALL}
    ratios: dict[str, list[float]] = defaultdict(list)
    missing: dict[str, str] = {}
    # Ours and its rival share a process and take turns: only so is their ratio steady.
    teams = [RIVALS, *([name] for name in ALL if name not in RIVALS)]
    for number in range(options.rounds):
        for team in [*teams[number:], *teams[:number]] if number < 2 else [RIVALS]:
            taken = _measure(team, options, missing)
            for name, times in taken.items():
                for what, values in times.items():
                    if values:
                        found[name][what].append(median(values))
            if set(RIVALS) <= set(taken):
                for label, (theirs, own) in _COMPARED.items():
                    pairs = zip(taken[RIVALS[1]][theirs], taken[RIVALS[0]][own], strict=False)
                    ratios[label].append(median(their / our for their, our in pairs))
    verdicts = [
        judge(label, ratios[label], least=None if "without" in label else 1) for label in _COMPARED
    ]
    order = sorted(
        (name for name in found if found[name].get(WHATS[0])),
        key=lambda name: median(found[name][WHATS[0]]),
    )
    rows = [
        [name, *(cell for what in WHATS for cell in _cells(found[name].get(what, [])))]
        for name in order
    ]
    text = "In one process, warm: medians in milliseconds, lowest and highest over the rounds. A"
    text += " save goes to a new name each time; a load goes into live tensors from the page cache."
    columns = ["", *(cell for what in WHATS for cell in (f"{what}, ms", "lowest to highest"))]
    title = "2,000 tensors of 64 bytes"
    return [Section(title, text, verdicts, columns, rows, list(missing.values()))]


# What is compared: the rival's time, then ours, which is always durable.
_COMPARED = {
    "durable save: speed / safetensors with fsync": ("durable save", "durable save"),
    "durable save: speed / safetensors without fsync": ("save as it is", "durable save"),
    "load: speed / safetensors": ("load", "load"),
}


def _measure(team: list[str], options: Options, missing: dict[str, str]) -> Times:
    """One child for ``team``; if it fails, one for each member that does not fail by itself."""
    team = [name for name in team if name not in missing]
    place = options.folder / "small"
    place.mkdir()
    try:
        seconds = 0.5 if options.quick else 1.0
        return child.call(
            "bench.small:measure", names=team, folder=str(place), seconds=seconds
        ) if team else {}  # fmt: skip
    except child.Failed as failure:
        if len(team) == 1:
            missing[team[0]] = f"{team[0]}: {failure}"
            return {}
    finally:
        disk.remove(place)
    return {
        name: times for each in team for name, times in _measure([each], options, missing).items()
    }


def _cells(values: list[float]) -> list[str]:
    return [f"{median(values):.1f}", spread(values, 1)] if values else ["-", "-"]
