"""Topic 8: how much code one save of one tensor walks through. A new engineer reads that much."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_TARGETS = {"files": 36, "functions": 150}
_CO_OPTIMIZED = 1  # CO_OPTIMIZED: bodies of functions, not of modules and classes


def measure(folder: str) -> dict[str, list[str]]:
    """In a child: the package's files and functions that a save, then a load, enters."""
    import torch

    import holdfast

    package = str(Path(holdfast.__file__).parent)
    seen: set[CodeType] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    found: dict[str, list[str]] = {}

    def walked(what: str, work: Callable[[], object]) -> None:
        seen.clear()
        threading.setprofile(enter)
        sys.setprofile(enter)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        own = [code for code in seen if code.co_filename.startswith(package)]
        whole = [c for c in own if c.co_flags & _CO_OPTIMIZED and not c.co_name.startswith("<")]
        names = {(c.co_filename.removeprefix(package + "/"), c.co_qualname) for c in whole}
        found[f"{what} functions"] = sorted(f"{file}: {name}" for file, name in names)
        found[f"{what} files"] = sorted({file for file, _ in names})

    place, state = str(Path(folder) / "walk"), {"weight": torch.ones(4)}
    walked("save", lambda: holdfast.save(place, state, step=1))
    walked("load", lambda: holdfast.load(place, into=state))
    return found


def sections(options: Options) -> list[Section]:
    title = "Code that one save of one tensor walks through"
    text = "Distinct files and functions of the package that are entered, in all threads."
    try:
        found = fresh_process.call("bench.code_path:measure", folder=str(options.folder))
    except fresh_process.MeasurementFailed as failure:
        verdicts = [
            judge(f"{unit} entered by a save", [], most=aim, unit="")
            for unit, aim in _TARGETS.items()
        ]
        return [Section(title, text, verdicts, missing=[f"holdfast: {failure}"])]
    finally:
        disk.remove(options.folder / "walk")
    verdicts = [
        judge(
            f"{unit} entered by a {what}", [len(found[f"{what} {unit}"])], unit="", digits=0,
            most=aim if what == "save" else None,
        )
        for what in ("save", "load") for unit, aim in _TARGETS.items()
    ]  # fmt: skip
    counts = [
        [file, str(sum(name.startswith(file + ": ") for name in found["save functions"]))]
        for file in found["save files"]
    ]
    return [Section(title, text, verdicts, ["entered by a save", "functions"], counts)]
