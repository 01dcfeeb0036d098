"""Topics 1 and 2: a durable save and a cold load of the large state, compared with the raw disk."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench import disk, fresh_process
from bench.report import Options, Section, Verdict, judge, spread

Samples = dict[str, list[float]]
OPERATIONS = ("save", "load")


def save(peer: str, size: int, folder: str) -> dict[str, float]:
    """Return the seconds until the bytes are durable, and the peak memory above the state.

    Runs in a child process.
    """
    from bench import resource_usage, states

    one = _warmed_up(peer, folder)
    state = states.large_state(size)
    with resource_usage.PeakMemory() as memory:
        start = time.perf_counter()
        one.save(state, Path(folder) / "big")
        if not one.durable:
            disk.fsync_tree(Path(folder) / "big")
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "memory": memory.peak_bytes()}


def load(peer: str, size: int, folder: str) -> dict[str, float]:
    """Return the seconds until live tensors hold the values, which are then checked.

    Runs in a child process.
    """
    from bench import resource_usage, states

    one = _warmed_up(peer, folder)
    into = states.blank_large_state(size)
    resident = disk.drop_page_cache(Path(folder) / "big")
    with resource_usage.PeakMemory() as memory:
        start = time.perf_counter()
        one.load(into, Path(folder) / "big")
        seconds = time.perf_counter() - start
        peak = memory.peak_bytes()
    if wrong := states.find_mismatches(into):
        raise ValueError(f"{len(wrong)} of {len(into)} tensors have wrong values")
    if resident > 0.01:
        raise ValueError(f"{resident:.0%} of the files stayed in the page cache")
    return {"seconds": seconds, "memory": peak}


def _warmed_up(name: str, folder: str):  # type: ignore[no-untyped-def]  # Library imports torch
    """Return the library after one tiny save and load, so that no import is timed."""
    from bench import libraries, states

    warnings.simplefilter("ignore")
    one, place, state = libraries.LIBRARIES[name], Path(folder) / "tiny", states.small_state(2)
    one.save(state, place)
    one.load(states.blank_like(state), place)
    disk.remove(place)
    return one


@dataclass
class _Measurements:
    """The measurements of all rounds so far."""

    options: Options
    seconds: dict[str, Samples] = field(default_factory=lambda: {what: {} for what in OPERATIONS})
    memory: dict[str, Samples] = field(default_factory=lambda: {what: {} for what in OPERATIONS})
    raw: dict[str, list[dict[str, float]]] = field(
        default_factory=lambda: {w: [] for w in OPERATIONS}
    )
    missing: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def best_thread_count(self, operation: str) -> str:
        """Return the number of threads that was fastest on the raw disk in the first round."""
        tried = self.raw[operation][:2]
        return min(tried[0], key=lambda threads: median(each[threads] for each in tried))

    def measure_raw_disk(self) -> None:
        """Measure the raw disk: all numbers of threads in the first round, later the best one."""
        choice = {what: list(disk.THREADS) for what in OPERATIONS}
        if len(self.raw["save"]) >= 2:
            choice = {what: [int(self.best_thread_count(what))] for what in OPERATIONS}
        found = fresh_process.call(
            "bench.disk:measure_raw", folder=str(self.options.folder), size=self.options.big,
            writers=choice["save"], readers=choice["load"],
        )  # fmt: skip
        for what in OPERATIONS:
            self.raw[what].append(found[what])

    def measure_library(self, name: str) -> None:
        if name in self.missing:
            return
        folder = self.options.folder
        try:
            for what in OPERATIONS:
                found = fresh_process.call(
                    f"bench.save_load:{what}", peer=name, size=self.options.big, folder=str(folder)
                )
                self.seconds[what].setdefault(name, []).append(found["seconds"])
                self.memory[what].setdefault(name, []).append(found["memory"] / 2**20)
        except fresh_process.MeasurementFailed as failure:
            self.missing[name] = f"{name}, {what}: {failure}"
        finally:
            disk.remove(folder / "big")
            disk.remove(folder / "tiny")

    def is_skipped(self, name: str) -> bool:
        """Return True if two rounds showed that this library is far from the fastest in both
        operations, or if time is short: the whole run should end within twelve minutes."""

        def slow(what: str) -> bool:
            usual = {peer: median(values) for peer, values in self.seconds[what].items()}
            return len(self.seconds[what][name]) >= 2 and usual[name] > 1.5 * min(usual.values())

        late = time.monotonic() - self.began > 240
        return name in self.missing or late or all(slow(what) for what in OPERATIONS)


def sections(options: Options) -> list[Section]:
    from bench.libraries import LIMPET, OTHER_LIBRARIES

    names, taken = [peer.name for peer in OTHER_LIBRARIES], _Measurements(options)
    for number in range(options.rounds):
        turned = [*names[number:], *names[:number]]
        half = len(turned) // 2
        for part in (turned[:half], turned[half:]):
            # The raw disk and Limpet run twice per round, next to each other, because the target
            # is their ratio.
            taken.measure_raw_disk()
            for name in [LIMPET.name, *part]:
                if name == LIMPET.name or number < 2 or not taken.is_skipped(name):
                    taken.measure_library(name)
    return [
        _section(what, options, taken.raw[what], taken.best_thread_count(what), taken.seconds[what],
                 taken.memory[what], [*taken.missing.values()])
        for what in OPERATIONS
    ]  # fmt: skip


def _section(
    operation: str,
    options: Options,
    raw: list[dict[str, float]],
    threads: str,
    seconds: Samples,
    memory: Samples,
    missing: list[str],
) -> Section:
    from bench.libraries import LIBRARIES

    floor = [each[threads] for each in raw]
    ours = seconds.get("limpet", [])
    verb = "write" if operation == "save" else "read"
    ratios = [a / b for a, b in zip(floor, ours, strict=False)]
    verdicts = [judge(f"speed / raw O_DIRECT {verb}", ratios, least=0.85)]
    verdicts += _library_verdicts(operation, seconds, median(floor))
    size = options.big / 2**30
    rows = [_row(f"raw O_DIRECT {verb}, {threads} threads", "", size, floor, floor, [], "")]
    for name, values in sorted(seconds.items(), key=lambda item: median(item[1])):
        peer = LIBRARIES[name]
        notes = {
            "save": ["" if peer.durable else "fsync added", peer.save_note],
            "load": [peer.load_note],
        }[operation]
        rows.append(
            _row(name, "yes" if name == "limpet" else "no", size, values, floor,
                 memory[name], "; ".join(filter(None, notes)))
        )  # fmt: skip
    title = "Durable save" if operation == "save" else "Cold load into live tensors"
    text = {
        "save": "One process; seconds until the file and folders are synced. The baseline writes"
        " the same number of random bytes from aligned memory (huge pages) in 8 MiB pieces, with"
        f" the best of {', '.join(map(str, disk.THREADS))} threads.",
        "load": "The files' pages are dropped before the load (checked with mincore), and the"
        " loaded values are compared afterward. The baseline reads into aligned, touched memory"
        " (huge pages).",
    }[operation] + (
        " The third round skips libraries that are far from the fastest, or all other libraries if"
        " time is short."
    )
    columns = [
        "",
        "digests",
        "s",
        "range",
        "runs",
        "GiB/s",
        "of raw",
        "memory, MiB",
        "note",
    ]
    return Section(f"{title}, {options.big >> 20} MiB", text, verdicts, columns, rows,
                   missing)  # fmt: skip


def _library_verdicts(operation: str, seconds: Samples, floor: float) -> list[Verdict]:
    peers = {name: values for name, values in seconds.items() if name != "limpet"}
    if not peers or "limpet" not in seconds:
        return [Verdict("speed / fastest other library", "more than 1 x")]
    fastest = min(peers, key=lambda name: median(peers[name]))
    ours = seconds["limpet"]
    pairs = [
        theirs / median(ours[2 * at : 2 * at + 2])
        for at, theirs in enumerate(peers[fastest])
        if ours[2 * at :]
    ]
    found = [judge(f"speed / fastest other library ({fastest})", pairs, least=1)]
    if operation == "save":
        room = 0.85 * median(peers[fastest]) / floor
        twice = judge("the same, if the disk allows it", pairs, least=2)
        if room < 2:
            reached = f"not possible: 0.85 of the raw write is {room:.1f} x"
            twice = Verdict(twice.name, twice.target, twice.figure, twice.spread, reached)
        found.append(twice)
    return found


def _row(
    name: str, digests: str, size: float, values: list[float], floor: list[float],
    memory: list[float], note: str,
) -> list[str]:  # fmt: skip
    middle = median(values)
    return [
        name, digests, f"{middle:.2f}", spread(values), str(len(values)), f"{size / middle:.2f}",
        f"{median(floor) / middle:.2f}", f"{median(memory):.0f}" if memory else "", note,
    ]  # fmt: skip
