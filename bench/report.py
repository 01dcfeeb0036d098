"""Tables, as plain text for the terminal and as the whole of ``docs/benchmarks.md``."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench import disk

YES, NO, UNKNOWN = "yes", "no", "not measured"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose. ``big`` and ``medium`` are sizes in bytes."""

    folder: Path
    big: int
    medium: int
    rounds: int
    quick: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target: what it asks, what was found, over which spread, and whether it is reached."""

    name: str
    target: str
    figure: str = "-"
    spread: str = "-"
    reached: str = UNKNOWN


@dataclass(slots=True)
class Section:
    """One topic of the report."""

    title: str
    text: str
    verdicts: list[Verdict]
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def judge(
    name: str,
    values: Sequence[float],
    *,
    least: float | None = None,
    most: float | None = None,
    unit: str = "x",
    digits: int = 2,
) -> Verdict:
    """The median of ``values`` against a target; with neither bound it is only reported."""
    target = "reported"
    if least is not None:
        target = f"at least {least:g} {unit}".strip()
    elif most is not None:
        target = f"at most {most:g} {unit}".strip()
    if not values:
        return Verdict(name, target)
    middle = median(values)
    reached = "-"
    if least is not None:
        reached = YES if middle >= least else NO
    elif most is not None:
        reached = YES if middle <= most else NO
    figure = f"{middle:.{digits}f} {unit}".strip()
    return Verdict(name, target, figure, spread(values, digits), reached)


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}" if values else "-"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], edge: str) -> list[str]:
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        middle = f" {edge} " if edge else "  "
        inside = middle.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"{edge} {inside} {edge}".strip() if edge else inside.rstrip()

    return [line(columns), line(["-" * width for width in widths]), *map(line, rows)]


def render(section: Section, *, markdown: bool) -> str:
    edge = "|" if markdown else ""
    lines = [f"## {section.title}" if markdown else f"\n=== {section.title}", "", section.text, ""]
    if section.verdicts:
        verdicts = [[v.name, v.target, v.figure, v.spread, v.reached] for v in section.verdicts]
        head = ["what", "target", "median", "lowest to highest", "reached"]
        lines += [*_table(head, verdicts, edge), ""]
    if section.rows:
        lines += [*_table(section.columns, section.rows, edge), ""]
    if section.missing:
        lines += ["Not measured:", "", *(f"- {each}" for each in section.missing), ""]
    return "\n".join(lines)


def render_document(sections: list[Section], options: Options, seconds: float, command: str) -> str:
    """The whole of ``docs/benchmarks.md``."""
    when = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y")
    size = f"{options.big >> 20} MiB"
    head = [
        "# Benchmarks",
        "",
        f"Written by `{command}` on {when} in {seconds / 60:.0f} minutes; not edited by hand.",
        "Every figure is a ratio between things measured in one run on one machine, in interleaved",
        f"rounds ({options.rounds}), each in a process of its own. The large state has {size}.",
        "",
        *([f"**A trial of the harness with small sizes ({size}): no figures to quote.**", ""]
          if options.quick else []),
        *_table(["machine", ""], machine_rows(options.folder), "|"),
        "",
        *_table(["package", "version"], version_rows(), "|"),
        "",
    ]  # fmt: skip
    limits = Path(__file__).with_name("limits.md")
    tail = ["## What limits the figures that are not reached", "", limits.read_text().strip(), ""]
    return "\n".join([*head, *(render(section, markdown=True) for section in sections), *tail])


def splice_sections(text: str, sections: list[Section]) -> str:
    """The document with these sections anew: in place of those of the same title, or at the end."""
    load = os.getloadavg()[1] / (os.cpu_count() or 1)
    when = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y")
    head, *parts = text.split("\n## ")
    for section in sections:
        section.text += (
            f" Measured apart from the rest, on {when}; processes that were ready to run, per core,"
            f" in the last five minutes: {load:.1f}."
        )
        made = render(section, markdown=True).removeprefix("## ")
        titles = [part.partition("\n")[0] for part in parts]
        if section.title in titles:
            parts[titles.index(section.title)] = made
        else:
            parts.insert(len(parts) - 1, made)  # before what limits the figures
    return "\n## ".join([head, *parts])


def machine_rows(folder: Path) -> list[list[str]]:
    """In general words: no host names and no paths."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        ["cores", str(len(os.sched_getaffinity(0)))],
        ["memory", f"{memory:.0f} GiB"],
        ["kernel", "Linux " + ".".join(platform.release().split(".")[:2])],
        ["architecture", platform.machine()],
        ["file system", disk.file_system(folder)],
        ["Python", platform.python_version()],
    ]


def version_rows() -> list[list[str]]:
    from bench.libraries import LIBRARIES

    packages = [*dict.fromkeys(peer.package for peer in LIBRARIES.values()), "numpy", "xxhash"]
    return [[package, installed_version(package) or "not installed"] for package in packages]


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
