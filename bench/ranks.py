"""Topic 10: the cost of a save and of the start of a load, for 8 to 1,024 ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from statistics import median
from typing import Any

from bench import fresh_process
from bench.report import Options, Section, Verdict, judge
from bench.simulated_ranks import LEAVES, SHAPES

RANKS = (8, 64, 256, 1024)
QUICK_RANKS = (8, 64)

Figures = dict[str, Any]


def _later_save(f: Figures, name: str) -> float:
    return median(save[name] for save in f["again"])


def _median_wait(save: Figures) -> float:
    """Return the median wait of the other ranks, which rank 0 serves one after the other."""
    return float(median(save["held_up_s"]))


def _commit_median(f: Figures, *names: str) -> float:
    return median(sum(save[n] for n in names) for save in f["commits"])


_ROWS: dict[str, Callable[[Figures], str]] = {
    "boxes of all ranks": lambda f: f"{f['ranks'] * LEAVES:,}",
    "first save: partition, s": lambda f: f"{f['first']['agree_s']:.3f}",
    "of that: waiting for values and reading them": lambda f: f"{f['first']['gather_s']:.3f}",
    "of that: reading local plans and planning": lambda f: f"{f['first']['plan_s']:.3f}",
    "of that: merging trees": lambda f: f"{f['first']['merge_s']:.3f}",
    "of that: distributing the plan": lambda f: f"{f['first'].get('scatter_s', 0):.3f}",
    "CPU time of rank 0 for it, s": lambda f: f"{f['first']['agree_cpu_s']:.3f}",
    "memory of rank 0 until the commit, MiB": lambda f: f"{f['peak_mib']:.0f}",
    "later saves: rank 0 is blocked, ms": lambda f: f"{1e3 * _later_save(f, 'agree_s'):.1f}",
    "CPU time of rank 0 for it, ms": lambda f: f"{1e3 * _later_save(f, 'agree_cpu_s'):.1f}",
    "another rank is blocked, ms": lambda f: f"{1e3 * median(map(_median_wait, f['again'])):.1f}",
    "commit: receipts, files, manifest, ms": lambda f: f"{1e3 * _commit_median(f, 'commit_s'):.0f}",
    "of that: checking all files": lambda f: f"{1e3 * _commit_median(f, 'commit_files_s'):.0f}",
    "of that: writing the manifest": lambda f: f"{1e3 * _commit_median(f, 'commit_put_s'):.0f}",
    "size of the manifest, KiB": lambda f: f"{f['manifest_bytes'] / 2**10:.0f}",
    "index files": lambda f: f"{f['indexes']:,}",
    "size of the indexes, MiB": lambda f: f"{f['indexes_bytes'] / 2**20:.1f}",
    "store traffic, first save, MiB": lambda f: f"{f['first']['nbytes'] / 2**20:.2f}",
    "store traffic, later saves, KiB": lambda f: f"{_later_save(f, 'nbytes') / 2**10:.0f}",
    "store calls of rank 0, first save": lambda f: f"{f['first']['calls']:,}",
    "store calls of rank 0, later saves": lambda f: f"{_later_save(f, 'calls'):,.0f}",
    "store calls of another rank, later saves": lambda f: f"{_later_save(f, 'others_calls'):.1f}",
    "one check for failed ranks, ms": lambda f: f"{1e3 * f['vigil_s']:.2f}",
    "keys left in the store": lambda f: f"{len(f['left'])}",
    "load: one rank reads all indexes, s": lambda f: f"{f['indexes_s']:.2f}",
    "load: read plan of that rank, s": lambda f: f"{f['read_plan_s']:.2f}",
    "load: CPU time of both, s": lambda f: f"{f['load_cpu_s']:.2f}",
    "load: memory of both, MiB": lambda f: f"{f['load_mib']:.0f}",
}


def sections(options: Options) -> list[Section]:
    made = [_section(shape, options) for shape in SHAPES]
    made[0].verdicts += _store_verdicts()
    return made


def _section(shape: str, options: Options) -> Section:
    found: list[Figures] = []
    missing = []
    for ranks in QUICK_RANKS if options.quick else RANKS:
        folder = options.folder / f"{shape}-{ranks}"
        given = {"ranks": ranks, "shape": shape, "folder": str(folder / "version_1")}
        try:
            found.append(fresh_process.call("bench.rank0:measure", timeout=600, **given))
        except fresh_process.MeasurementFailed as failure:
            missing.append(f"{ranks} ranks: {failure}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    columns = ["ranks", *(f"{f['ranks']:,}" for f in found)]
    rows = [[name, *map(show, found)] for name, show in _ROWS.items()] if found else []
    most = [f for f in found if f["ranks"] == RANKS[-1]]
    return Section(
        f"Saves by 8 to 1,024 ranks, {shape}: {SHAPES[shape]}", _TEXT, _verdicts(most), columns,
        rows, missing,
    )  # fmt: skip


def _verdicts(found: list[Figures]) -> list[Verdict]:
    first = [f["first"]["agree_s"] + _commit_median(f, "commit_s") for f in found]
    again = [a["agree_s"] + _commit_median(f, "commit_s") for f in found for a in f["again"]]
    return [
        judge("1,024 ranks: gather, plan, and manifest", first, most=5, unit="s"),
        judge("memory of rank 0", [f["peak_mib"] for f in found], most=200, unit="MiB",
              digits=0),
        judge("the same with an unchanged structure", again, most=0.5, unit="s", digits=3),
        judge("1,024 ranks: read the indexes of a million boxes, plan a load",
              [f["indexes_s"] + f["read_plan_s"] for f in found], unit="s"),
        judge("memory of one rank for this", [f["load_mib"] for f in found], most=256, unit="MiB",
              digits=0),
    ]  # fmt: skip


def _store_verdicts() -> list[Verdict]:
    try:
        found = fresh_process.call("bench.rank0:measure_store_calls")
    except fresh_process.MeasurementFailed:
        found = {}
    called = {
        "poll for an absent key": ("look_s", 1e6, "us"),
        "read of one value": ("take_s", 1e6, "us"),
        "polls that one store answers, 4 clients": ("rate", 1, "per second"),
    }
    return [
        judge(label, [factor * found[name]] if found else [], unit=unit, digits=0)
        for label, (name, factor, unit) in called.items()
    ]


_TEXT = (
    f"Each rank has {LEAVES} boxes, a progress counter, and random generators. A real TCPStore runs"
    " in its own process. Rank 0 runs the library, without writing its shard. The library also"
    " makes the messages of the other ranks; two processes on the same cores send them for one rank"
    " after the other, so the seconds are upper bounds. Every save is one `Collective`. The first"
    " save exchanges the structure. Later saves are the median of five, commits are the median of"
    " three, and all other figures are from one run. The load is into half as many ranks, and is"
    " measured until the first byte of a tensor is read."
)
