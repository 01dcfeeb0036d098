"""Topic: what an evaluation of a version costs, and how it scales with workers."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench import disk, fresh_process
from bench.report import Options, Section, judge
from bench.resource_usage import cpu_seconds

_RECORDS = 4096
_BATCH = 32
_WIDTH = 768
_VERSIONS = 6


def make_model() -> Any:
    import torch

    layers = (torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(16))
    return torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.GELU())))


def dataset() -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(_RECORDS, _WIDTH, generator=generator))


def setup(state: dict[str, Any]) -> Any:
    model = make_model()
    model.load_state_dict(state["model"])
    return model


def evaluate(model: Any, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    return {"mean": (outputs.sum(), outputs.numel()), "max": (outputs.max(), 1)}


def make_run(folder: str, versions: int) -> None:
    """Save the versions. Runs in a child process."""
    import torch

    import limpet

    for step in range(1, versions + 1):
        torch.manual_seed(step)
        limpet.save(Path(folder) / f"version_{step}", {"model": make_model()}, step=step)


def measure_loop(folder: str, versions: int, half: int | None = None) -> dict[str, list[float]]:
    """Return the CPU and wall seconds per version of a bare loop over the data on one thread, and
    the CPU seconds of the load, without the first version.

    ``half``: 0 or 1, to loop over only this half of the data, beside the loop over the other half.
    Runs in a child process.
    """
    import torch
    from torch.utils.data import DataLoader

    import limpet

    torch.set_num_threads(1)
    data = dataset()
    if half is not None:
        (records,) = data.tensors
        data = torch.utils.data.TensorDataset(records.chunk(2)[half])
    found: dict[str, list[float]] = {"loop": [], "load": [], "wall": []}
    for step in range(1, versions + 1):
        if half is not None:
            _both.wait()
        began, cpu = time.perf_counter(), time.process_time()
        model = setup(limpet.load(Path(folder) / f"version_{step}", keys="model/**")).eval()
        loaded = time.process_time()
        sums: dict[str, list[float]] = {}
        with torch.no_grad():
            for batch in DataLoader(data, _BATCH):
                for name, (total, count) in evaluate(model, batch).items():
                    kept = sums.setdefault(name, [0.0, 0.0])
                    kept[0] += float(total)
                    kept[1] += count
        found["load"].append(loaded - cpu)
        found["loop"].append(time.process_time() - loaded)
        found["wall"].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in found.items()}


def measure_evaluation(folder: str, workers: int) -> dict[str, list[float]]:
    """Return the CPU seconds (of all processes) and wall seconds per version of an evaluation,
    without the first version, before which the workers start.

    Runs in a child process.
    """
    import limpet
    from limpet.evaluation import Selection

    cpu: list[float] = []
    wall: list[float] = []
    evaluation = limpet.Evaluation(
        folder,
        "bench.evaluation:setup",
        "bench.evaluation:evaluate",
        data="bench.evaluation:dataset",
        name=f"workers-{workers}",
        workers=workers,
        batch_size=_BATCH,
        keys="model/**",
        select=Selection(skip_none=True),
    )

    def note(outcome: Any) -> None:
        if outcome.state != "DONE":
            raise fresh_process.MeasurementFailed(outcome.cause)
        cpu.append(cpu_seconds())
        wall.append(outcome.seconds)

    evaluation.run(note)
    return {
        "cpu": [after - before for before, after in pairwise(cpu)],
        "wall": wall[1:],
    }


_both: Any = None
"""The barrier of the two loops that run at once, in each of their processes."""


def _set_barrier(barrier: Any) -> None:
    global _both
    _both = barrier


def measure_two_loops(folder: str, versions: int) -> dict[str, list[float]]:
    """Return the CPU seconds per version of two bare loops at once, each over half of the data in a
    process of its own, and with a load of its own, without the first version.

    Both begin each version together, as two workers do. Runs in a child process.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, _set_barrier, (context.Barrier(2),)) as pool:
        halves = [*pool.map(partial(measure_loop, folder, versions), range(2))]
    parts = [half[name] for half in halves for name in ("loop", "load")]
    return {"cpu": [sum(seconds) for seconds in zip(*parts, strict=True)]}


def sections(options: Options) -> list[Section]:
    versions = 3 if options.quick else _VERSIONS
    title = "Evaluation of versions: CPU time and scaling"
    text = (
        f"{_RECORDS} records in batches of {_BATCH} through a model of 16 layers of {_WIDTH} x"
        f" {_WIDTH}. The baseline is a loop over the same data in one process with one thread,"
        " which loads each version, too. For two workers, it is two such loops at once, in two"
        " processes, each over half of the data: they share the caches and the memory of the"
        " processor, as two workers do. CPU seconds are those of the evaluator and its workers"
        f" together. The first of {versions} versions does not count: the workers start before it."
        " Runs alternate."
    )
    what = "CPU time of 1 worker / (loop + load)"
    folder = options.folder / "evaluated"
    found: dict[str, list[float]] = {}
    try:
        fresh_process.call("bench.evaluation:make_run", folder=str(folder), versions=versions)
        for _ in range(options.rounds):
            loop, one, loops, two = (
                fresh_process.call(f"bench.evaluation:{name}", folder=str(folder), **arguments)
                for name, arguments in (
                    ("measure_loop", {"versions": versions}),
                    ("measure_evaluation", {"workers": 1}),
                    ("measure_two_loops", {"versions": versions}),
                    ("measure_evaluation", {"workers": 2}),
                )
            )
            for path in folder.glob("version_*/eval-*.json"):
                path.unlink()
            per_loop, load = median(loop["loop"]), median(loop["load"])
            for name, value in (
                ("one", median(one["cpu"]) / (per_loop + load)),
                ("two", median(two["cpu"]) / median(loops["cpu"])),
                ("two against one loop", median(two["cpu"]) / (per_loop + 2 * load)),
                ("loops", median(loops["cpu"]) / (per_loop + 2 * load)),
                ("scaling", median(one["wall"]) / median(two["wall"])),
                ("against loop", median(loop["wall"]) / median(one["wall"])),
                ("loop", per_loop),
                ("load", load),
                ("wall", median(one["wall"])),
                ("wall two", median(two["wall"])),
            ):
                found.setdefault(name, []).append(value)
    except fresh_process.MeasurementFailed as failure:
        return [Section(title, text, [judge(what, [], most=1.05)], missing=[str(failure)])]
    finally:
        disk.remove(folder)
    verdicts = [
        judge(what, found["one"], most=1.05),
        judge("CPU time of 2 workers / 2 loops at once, with their loads", found["two"], most=1.05),
        judge("CPU time of 2 workers / (loop alone + 2 loads)", found["two against one loop"]),
        judge("CPU time of 2 loops at once / (loop alone + 2 loads)", found["loops"]),
        judge("speed of 2 workers / 1 worker", found["scaling"]),
        judge("speed of 1 worker / the loop", found["against loop"]),
        judge("CPU time of the loop", found["loop"], unit="s"),
        judge("CPU time of a load", found["load"], unit="s", digits=3),
        judge("a version with 1 worker", found["wall"], unit="s"),
        judge("a version with 2 workers", found["wall two"], unit="s"),
    ]
    return [Section(title, text, verdicts)]
