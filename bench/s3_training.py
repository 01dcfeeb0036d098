"""Training during a save to S3 in the background, with each library that has such saves."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

from bench import fresh_process
from bench.report import Options, Section, Verdict, judge, spread
from bench.s3_server import connection_to, environment_of
from bench.s3_transfer import Connection

_ROUNDS = 5
_QUIET_SECONDS = 1.5


def measure(connection: Connection, bucket: str, size: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a training step, without a save and during one in the background.

    By library: "quiet" and "save" (a step), "call" (the call that starts a save), "took" (the rest
    of the save), and "lost" (the time of the call and of the steps during the save, minus that of
    as many steps without one). Also "failed", an empty list by "LIBRARY: error".
    Runs in a child process.
    """
    import torch

    import limpet
    from bench import states
    from bench.s3_libraries import LIMPET, OTHER_S3_LIBRARIES

    warnings.simplefilter("ignore")
    os.environ |= environment_of(connection)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    weights, state = torch.randn(1024, 1024), states.large_state(size)
    found: dict[str, dict[str, list[float]]] = {}

    def train(going: Callable[[], bool]) -> list[float]:
        """Return the seconds of each step: at least one."""
        taken: list[float] = []
        while not taken or going():
            start = time.perf_counter()
            weights @ weights @ weights
            taken.append(time.perf_counter() - start)
        return taken

    def measure_one(name: str, start_save: Callable[[], Callable[[], object]]) -> None:
        end = time.perf_counter() + _QUIET_SECONDS
        usual = median(train(lambda: time.perf_counter() < end))
        start = time.perf_counter()
        wait = start_save()
        called = time.perf_counter()
        with ThreadPoolExecutor(1) as threads:
            saved = threads.submit(lambda: (wait(), time.perf_counter())[1])
            steps = train(lambda: not saved.done())
        lost = called - start + sum(steps) - usual * len(steps)
        sample = {"quiet": usual, "save": median(steps), "call": called - start, "lost": lost}
        for what, value in {**sample, "took": saved.result() - called}.items():
            found.setdefault(name, {}).setdefault(what, []).append(value)

    def start_other(start_save: Callable[..., Future[Any]], url: str) -> Callable[[], object]:
        return start_save(state, url).result

    with limpet.Checkpointer(
        limpet.open_store(f"s3://{bucket}/overlap", **connection),
        {"model": state},
        save=limpet.EverySteps(1),
        keep=limpet.KeepLast(2),
    ) as checkpointer:

        def start_limpet() -> Callable[[], object]:
            checkpointer.step()
            return checkpointer.wait

        starts = {LIMPET.name: start_limpet}
        for each in OTHER_S3_LIBRARIES:
            if each.start_save is not None:
                url = f"s3://{bucket}/{each.name.replace(' ', '-')}"
                starts[each.name] = lambda s=each.start_save, u=url: start_other(s, u)  # type: ignore[misc]
        for number in range(_ROUNDS + 1):
            for name, start in [*starts.items()]:
                try:
                    measure_one(name, start)
                except Exception as e:  # noqa: BLE001  (reported)
                    found.setdefault("failed", {})[f"{name}: {type(e).__name__}: {e}"[:160]] = []
                    del starts[name]
            if not number:  # the first save also allocates buffers and connections
                found = {"failed": found["failed"]} if "failed" in found else {}
    return found


def section(options: Options, endpoint: str) -> Section:
    size = options.medium // 4
    title = f"S3: training during a save of {size >> 20} MiB"
    text = (
        "A background save to the discarding server, which takes time from the training too, as it"
        " runs on the same cores. A training step consists of two 1024 x 1024 float32 matrix"
        " products on all cores. The libraries take turns in one process. Lost time is the time of"
        " the call that starts the save, plus the time of the steps during it, minus the time of as"
        " many steps without one. The others save with dcp.async_save; their copy of the state is"
        " part of the call."
    )
    try:
        found = fresh_process.call(
            "bench.s3_training:measure", timeout=400, connection=connection_to(endpoint),
            bucket="discard", size=size,
        )  # fmt: skip
    except fresh_process.MeasurementFailed as failure:
        return Section(title, text, [], missing=[str(failure)])
    missing, rows = [*found.pop("failed", {})], []
    for name, taken in found.items():
        ratios = [a / b for a, b in zip(taken["save"], taken["quiet"], strict=True)]
        rows.append([
            name, _cell(taken["quiet"], 1000, 1), _cell(ratios), _cell(taken["call"], 1000, 0),
            _cell(taken["took"]), _cell(taken["lost"]),
        ])  # fmt: skip
    columns = [
        "median (range)", "step without a save, ms", "step during / without",
        "call that starts a save, ms", "save after the call, s", "lost time, s",
    ]  # fmt: skip
    return Section(title, text, _compare(found), columns, rows, missing)


def _compare(found: dict[str, dict[str, list[float]]]) -> list[Verdict]:
    ours, *others = found
    if not others:
        return []
    best = min(others, key=lambda name: median(found[name]["lost"]))
    pairs = zip(found[ours]["lost"], found[best]["lost"], strict=False)
    return [judge(f"lost time / that with {best}", [a / b for a, b in pairs])]


def _cell(values: list[float], factor: float = 1, digits: int = 2) -> str:
    scaled = [factor * each for each in values]
    return f"{median(scaled):.{digits}f} ({spread(scaled, digits)})"
