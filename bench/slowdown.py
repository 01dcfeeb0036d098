"""Topic 5: the cost of a background save for training: CPU seconds and slower steps."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_REPEATS = 5
_QUIET_SECONDS = 1.5


def _dd_command(source: str, target: Path) -> list[str]:
    return ["dd", f"if={source}", f"of={target}", "bs=8M", "oflag=direct", "conv=fsync"]


def measure_cpu(folder: str, size: int) -> dict[str, list[float]]:
    """Return the CPU seconds per GiB of each operation, measured in turn on an idle process.

    Runs in a child process.
    """
    from xxhash import xxh3_128_digest

    from bench import resource_usage, states

    place, state = Path(folder), states.large_state(size)
    source = place / "source"
    with source.open("wb") as file:
        for value in state.values():
            file.write(memoryview(value.numpy()).cast("B"))
    disk.fsync_tree(source)
    found: dict[str, list[float]] = {}
    gib = size / 2**30

    def taken(name: str, work: Callable[[], object]) -> None:
        start = resource_usage.cpu_seconds()
        work()
        found.setdefault(name, []).append((resource_usage.cpu_seconds() - start) / gib)

    def digest() -> None:
        for value in state.values():
            xxh3_128_digest(value.numpy())

    def copy(origin: str) -> None:
        command = [*_dd_command(origin, place / "copy"), f"count={-(-size // disk.CHUNK)}"]
        subprocess.run(command, check=True, capture_output=True)

    with _checkpointer(place, state) as checkpointer:
        for repeat in range(_REPEATS + 1):
            taken("dd", lambda: copy(str(source)))
            disk.remove(place / "copy")
            taken("dd of zeros", lambda: copy("/dev/zero"))
            disk.remove(place / "copy")
            taken("digest", digest)
            taken("staging", checkpointer.step)
            taken("background", checkpointer.wait)
            if repeat == 0:  # the first save also allocates the buffers
                found.clear()
    return found


def measure_steps(folder: str, size: int) -> dict[str, list[float]]:
    """Return the seconds of a training step: alone, during a save, and during ``dd``.

    Runs in a child process.
    """
    import torch

    from bench import states

    place, state = Path(folder), states.large_state(size)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    weights = torch.randn(1024, 1024)

    def train(going: Callable[[], bool]) -> list[float]:
        taken = []
        while going():
            start = time.perf_counter()
            product = weights
            for _ in range(2):
                product = product @ weights
            taken.append(time.perf_counter() - start)
        return taken

    found: dict[str, list[float]] = {}

    def note(name: str, taken: list[float]) -> None:
        usual = found["quiet"][-1] if name != "quiet" else 0.0
        found.setdefault(name, []).append(median(taken))
        lost = sum(taken) - usual * len(taken)
        found.setdefault(f"{name} lost", []).append(lost / (size / 2**30))
        found.setdefault(f"{name} took", []).append(sum(taken))

    def quiet() -> None:
        end = time.perf_counter() + _QUIET_SECONDS
        note("quiet", train(lambda: time.perf_counter() < end))

    with _checkpointer(place, state) as checkpointer:
        checkpointer.step()
        checkpointer.wait()
        for _ in range(_REPEATS):
            quiet()
            checkpointer.step()
            waiter = threading.Thread(target=checkpointer.wait)
            waiter.start()
            note("save", train(waiter.is_alive))
            quiet()
            with subprocess.Popen(
                _dd_command(str(place / "source"), place / "copy"), stderr=subprocess.DEVNULL
            ) as writer:
                note("dd", train(lambda running=writer: running.poll() is None))
            disk.remove(place / "copy")
    return found


def _checkpointer(place: Path, state: object):  # type: ignore[no-untyped-def]
    import limpet

    return limpet.Checkpointer(
        str(place / "run"),
        {"model": state},
        save=limpet.EverySteps(1),
        keep=limpet.KeepLast(2),
    )


def sections(options: Options) -> list[Section]:
    title = f"Slowdown of training during a save of {options.medium >> 20} MiB"
    text = (
        "User and system CPU seconds of all threads and children, from the second save on, from the"
        " return of step() until the commit. `dd` writes the same bytes from the page cache with"
        " direct I/O and fsync. A training step consists of two 1024 x 1024 float32 matrix products"
        " on all cores; only steps after staging count. Lost time is the time of the steps minus"
        " the time of as many steps without a save."
    )
    target = "CPU time of the background / (dd + one XXH3-128 pass)"
    place = options.folder / "slowdown"
    place.mkdir()
    try:
        used = fresh_process.call(
            "bench.slowdown:measure_cpu", folder=str(place), size=options.medium
        )
        disk.remove(place / "run")
        taken = fresh_process.call(
            "bench.slowdown:measure_steps", folder=str(place), size=options.medium
        )
    except fresh_process.MeasurementFailed as failure:
        missing = [f"limpet: {failure}"]
        return [Section(title, text, [judge(target, [], most=1.5)], missing=missing)]
    finally:
        disk.remove(place)
    floor = [a + b for a, b in zip(used["dd"], used["digest"], strict=True)]
    ratios = [a / b for a, b in zip(used["background"], floor, strict=True)]
    both = [a + b for a, b in zip(used["background"], used["staging"], strict=True)]
    verdicts = [
        judge(target, ratios, most=1.5),
        judge(
            "the same, including step() (staging)",
            [a / b for a, b in zip(both, floor, strict=True)],
        ),
    ]
    for name, label in (
        ("background", "CPU time of the background"),
        ("staging", "CPU time of step() (staging)"),
        ("dd", "CPU time of dd"), ("dd of zeros", "CPU time of dd from /dev/zero"),
        ("digest", "CPU time of one XXH3-128 pass"),
    ):  # fmt: skip
        verdicts.append(judge(label, used[name], unit="s/GiB", digits=3))
    # Steps without a save run right before each save and each dd, because the machine drifts.
    before = {"save": taken["quiet"][::2], "dd": taken["quiet"][1::2]}
    slower = {
        name: [a / b for a, b in zip(taken[name], before[name], strict=True)] for name in before
    }
    verdicts += [
        judge("training step without a save", [1000 * each for each in taken["quiet"]], unit="ms"),
        judge("training step during a save / without", slower["save"]),
        judge("training step during dd / without", slower["dd"]),
        judge("training time lost to a save", taken["save lost"], unit="s/GiB"),
        judge("training time lost to dd", taken["dd lost"], unit="s/GiB"),
        judge("duration of a save during training", taken["save took"], unit="s"),
        judge("duration of dd during training", taken["dd took"], unit="s"),
    ]
    return [Section(title, text, verdicts)]
