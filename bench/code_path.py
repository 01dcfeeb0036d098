"""Topic 8: how much code one save of one tensor enters, and whether its calls go down.

A new engineer reads this much. Counted are distinct files and functions of the package, in all
threads.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_TARGETS = {"files": 36, "functions": 150, "packages": 8, "upward calls": 0}
_CO_OPTIMIZED = 1  # the code flag of function bodies; modules and classes lack it
_LONG = 6
"""Lines from which on a function counts as one that takes time to read."""

LAYERS = (
    ("(root)",),
    ("format",),
    ("storage", "data", "sinks"),
    ("layout", "ranks"),
    ("state",),
    ("snapshot",),
    ("saving", "loading"),
    ("convert",),
    ("run", "interop"),
    ("training",),
    ("(public names)",),
)
"""The packages from the bottom up, as in docs/design.md."""

RANKS = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}


def package_of(file: str) -> str:
    """The package of a file in the package's folder, such as ``saving``."""
    parts = file.split("/")
    if len(parts) == 1:
        return "(public names)" if file == "__init__.py" else "(root)"
    return parts[0]


def measure(folder: str) -> dict[str, list[str]]:
    """Run in a fresh process: what a save, then a load, enters.

    By "save" and "load", each with "files", "functions", "long functions", "packages" (the root
    modules count as one), and "upward calls": functions that are called by a lower layer. Nested
    functions are not counted there: they are passed down to be called.
    """
    import torch

    import limpet

    package = str(Path(limpet.__file__).parent) + "/"
    entered: set[CodeType] = set()
    calls: set[tuple[CodeType, CodeType]] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code)
            if frame.f_back is not None:
                calls.add((frame.f_back.f_code, frame.f_code))

    found: dict[str, list[str]] = {}

    def walk(what: str, work: Callable[[], object]) -> None:
        entered.clear()
        calls.clear()
        threading.setprofile(enter)
        sys.setprofile(enter)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        functions = [
            code
            for code in entered
            if code.co_filename.startswith(package)
            and code.co_flags & _CO_OPTIMIZED
            and not code.co_name.startswith("<")
        ]
        names = {code: f"{file_of(code)}: {code.co_qualname}" for code in functions}
        files = {file_of(code) for code in functions}
        found[f"{what} functions"] = sorted(names.values())
        found[f"{what} long functions"] = sorted(
            name for code, name in names.items() if lines_of(code) >= _LONG
        )
        found[f"{what} files"] = sorted(files)
        packages = {package_of(file) for file in files} - {"(public names)"}
        found[f"{what} packages"] = sorted(packages | {"(root)"})
        found[f"{what} upward calls"] = sorted(
            f"{names[caller]} -> {names[callee]}"
            for caller, callee in calls
            if caller in names
            and callee in names
            and {callee.co_name, callee.co_qualname.partition(".")[0]} & {*caller.co_names}
            and RANKS[package_of(file_of(caller))] < RANKS[package_of(file_of(callee))]
        )

    def file_of(code: CodeType) -> str:
        return code.co_filename.removeprefix(package)

    def lines_of(code: CodeType) -> int:
        return max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1

    place, state = str(Path(folder) / "walk"), {"weight": torch.ones(4)}
    walk("save", lambda: limpet.save(place, state, step=1))
    walk("load", lambda: limpet.load(place, into=state))
    return found


def sections(options: Options) -> list[Section]:
    title = "Code that one save of one tensor enters"
    text = (
        "Distinct files and functions of the package that are entered, in all threads. A function"
        f" is long from {_LONG} lines on. A call is upward if a lower layer calls a function by its"
        " name; callbacks are not counted."
    )
    try:
        found = fresh_process.call("bench.code_path:measure", folder=str(options.folder))
    except fresh_process.MeasurementFailed as failure:
        verdicts = [
            judge(f"{unit} of a save", [], most=target, unit="")
            for unit, target in _TARGETS.items()
        ]
        return [Section(title, text, verdicts, missing=[f"limpet: {failure}"])]
    finally:
        disk.remove(options.folder / "walk")
    verdicts = [
        judge(
            f"{unit} of a {what}",
            [len(found[f"{what} {unit}"])],
            unit="",
            digits=0,
            most=target if what == "save" or "calls" in unit else None,
        )
        for what in ("save", "load")
        for unit, target in [*_TARGETS.items(), ("long functions", None)]
    ]
    functions = Counter(name.partition(": ")[0] for name in found["save functions"])
    counts = [[file, str(functions[file])] for file in found["save files"]]
    return [Section(title, text, verdicts, ["entered by a save", "functions"], counts)]
