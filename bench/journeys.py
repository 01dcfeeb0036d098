"""How much code the journeys of a user enter: a new engineer reads this much to follow one.

Counted are distinct files of the package and distinct functions (bodies of modules and classes are
left out), in all threads, with one tensor, one process, and a local folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType

from bench import disk, fresh_process
from bench.report import Options, Section, judge

AIMS = {
    "save": (32, 180),
    "load": (40, 220),
    "step with a save": (45, 260),
    "construct and resume": (65, 380),
    "SIGTERM to exit": (60, 380),
    "one evaluated version": (40, 250),
}
"""For each journey, the aims for its files and functions."""

_CO_OPTIMIZED = 1  # the code flag of function bodies; modules and classes lack it


class Trace:
    """Records the files and functions of the package that a ``with`` block enters."""

    def __init__(self, package: str) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str, int]] = set()
        self._package = package

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_flags & _CO_OPTIMIZED
            and code.co_filename.startswith(self._package)
        ):
            name = code.co_filename.removeprefix(self._package)
            self.files.add(name)
            self.functions.add((name, code.co_qualname, code.co_firstlineno))

    def __enter__(self) -> Trace:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def measure(folder: str) -> dict[str, tuple[int, int]]:
    """Run in a fresh process: the numbers of files and functions of each journey."""
    import torch

    import limpet

    warnings.simplefilter("ignore")
    package = str(Path(limpet.__file__).parent) + os.sep
    top, weight, found = Path(folder), torch.zeros(10), dict[str, Trace]()
    state, never = {"w": weight}, limpet.EverySteps(1000)

    def trace(journey: str) -> Trace:
        return found.setdefault(journey, Trace(package))

    limpet.save(top / "warm", state)
    with trace("save"):
        limpet.save(top / "one", state)
    with trace("load"):
        limpet.load(top / "one", into=state)
    run, save = top / "run", limpet.EverySteps(1)
    with limpet.Checkpointer(run, state, save=save, quiet=True) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.wait()
        with trace("step with a save"):
            ckpt.step()
            ckpt.wait()
    with trace("construct and resume"):
        ckpt = limpet.Checkpointer(run, state, save=save, quiet=True)
        ckpt.resume()
    ckpt.close()
    job = limpet.Evaluation(
        run, lambda: None, lambda _model, _data: {"loss": (1.0, 1)}, data=lambda: [0], workers=0
    )
    with trace("one evaluated version"):
        job.run()
    ckpt = limpet.Checkpointer(top / "left", state, save=never, quiet=True)
    ckpt.resume()
    ckpt.step()
    with contextlib.suppress(SystemExit), trace("SIGTERM to exit"):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(200):
            ckpt.step()
            time.sleep(0.02)
    with contextlib.suppress(SystemExit):
        ckpt.close()
    return {journey: (len(t.files), len(t.functions)) for journey, t in found.items()}


def sections(options: Options) -> list[Section]:
    title, folder = "Code that each journey enters", options.folder / "journeys"
    text = (
        "Distinct files and functions of the package that are entered, in all threads, with one"
        " tensor in one process. PyTorch's DCP enters 15 and 104 for a save, and 14 and 87 for a"
        " load (November 2026)."
    )
    counts, missing = dict[str, tuple[int, int]](), list[str]()
    try:
        counts = fresh_process.call("bench.journeys:measure", folder=str(folder))
    except fresh_process.MeasurementFailed as failure:
        missing.append(f"limpet: {failure}")
    finally:
        disk.remove(folder)
    verdicts = [
        judge(
            f"{unit} of: {journey}",
            [counts[journey][column]] if journey in counts else [],
            unit="",
            digits=0,
            most=aims[column],
        )
        for journey, aims in AIMS.items()
        for column, unit in enumerate(("files", "functions"))
    ]
    return [Section(title, text, verdicts, missing=missing)]
