"""Topic 6: peak memory beyond the state, for a save, a load, and background saves."""

from __future__ import annotations

from pathlib import Path

from bench import disk, fresh_process
from bench.report import Options, Section, judge
from bench.states import MIB

_KINDS = {
    "save": "synchronous save",
    "load": "load into live tensors",
    "first": "first asynchronous save",
    "third": "asynchronous saves, up to the third",
}


def measure(kind: str, folder: str, size: int) -> dict[str, int]:
    """Return the peak bytes above those of the process with its state. All pages count.

    Runs in a child process.
    """
    import limpet
    from bench import resource_usage, states

    place, state = Path(folder), states.large_state(size)
    limpet.save(str(place / "tiny"), states.small_state(2), step=1)
    if kind == "save":
        with resource_usage.PeakMemory(children=True) as memory:
            limpet.save(str(place / "one"), {"model": state}, step=1)
            return {kind: memory.peak_bytes()}
    if kind == "load":
        limpet.load(str(place / "tiny"), into=states.small_state(2))
        with resource_usage.PeakMemory(children=True) as memory:
            limpet.load(str(place / "one"), into={"model": state})
            return {kind: memory.peak_bytes()}
    found = {}
    with (
        resource_usage.PeakMemory(children=True) as memory,
        limpet.Checkpointer(
            str(place / "run"),
            {"model": state},
            save=limpet.EverySteps(1),
            keep=limpet.KeepLast(2),
        ) as checkpointer,
    ):
        for name in ("first", "second", "third"):
            checkpointer.step()
            checkpointer.wait()
            found[name] = memory.peak_bytes()
    return found


def sections(options: Options) -> list[Section]:
    found: dict[str, list[float]] = {}
    missing: list[str] = []
    place = options.folder / "memory"
    for _ in range(1 if options.quick else 2):
        for kind in ("save", "load", "asynchronous"):
            place.mkdir(exist_ok=True)
            disk.remove(place / "tiny")
            try:
                peaks = fresh_process.call(
                    "bench.memory:measure", kind=kind, folder=str(place), size=options.big
                )
            except fresh_process.MeasurementFailed as failure:
                missing = sorted({*missing, f"limpet, {kind}: {failure}"})
                continue
            for name, peak in peaks.items():
                found.setdefault(name, []).append(peak / MIB)
        disk.remove(place)
    copy = options.big // MIB
    most = {"save": 256, "load": 256, "first": copy + 256, "third": copy + 256}
    verdicts = [
        judge(label, found.get(name, []), most=most[name], unit="MiB", digits=0)
        for name, label in _KINDS.items()
    ]
    text = (
        "The kernel's high-water mark of resident memory, minus the resident memory of the process"
        " with its state. It includes anonymous, shared, and mapped pages, and the memory of child"
        f" processes. An asynchronous save may use one copy of the state ({copy} MiB) plus 256 MiB;"
        " the next save uses the same memory again."
    )
    title = f"Memory beyond the state, {copy} MiB"
    return [Section(title, text, verdicts, missing=missing)]
