"""Topic 12: real ranks save and load a replicated and a sharded state, compared with DCP."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench import disk, fresh_process
from bench.report import NO, Options, Section, Verdict, judge, spread

RANKS = (2, 4)
LIBRARIES = ("limpet", "DCP", "DCP, 4 threads")
LAYOUTS = {
    "replicated": "every rank has the whole state, as with DDP",
    "sharded": "every rank has an equal part of each tensor, as with FSDP2",
}
TARGETS = {
    ("replicated", "save"): None,
    ("replicated", "load"): 1.5,
    ("sharded", "save"): 2.0,
    ("sharded", "load"): 2.0,
}
_MOST_RESIDENT = 0.01

Samples = dict[str, list[float]]


def measure(rank: int, ranks: int, port: int, folder: str, size: int, layout: str, rounds: int,
            ) -> Samples:  # fmt: skip
    """Return the seconds of each operation of each library, as one of the ranks.

    Runs in a child process. All ranks begin and end each operation together.
    """
    import torch
    import torch.distributed as dist

    from bench import states

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found: Samples = {}
    tiny = _make_state(2 * states.TENSOR_BYTES, layout, rank, ranks)
    for name in LIBRARIES:  # so that no import is timed
        _save(name, tiny, Path(folder) / f"tiny {name}")
        dist.barrier()
        _load(name, tiny, Path(folder) / f"tiny {name}")
    state = _make_state(size, layout, rank, ranks)
    for number in range(rounds):
        order = LIBRARIES if number % 2 == 0 else LIBRARIES[::-1]
        for name in order:
            place = Path(folder) / f"{name} {number}"
            found.setdefault(f"{name} save", []).append(_timed(partial(_save, name, state, place)))
        for name in order:
            place = Path(folder) / f"{name} {number}"
            for value in state.values():
                _local(value).fill_(-1.0)
            resident = disk.drop_page_cache(place) if rank == 0 else 0.0
            if resident > _MOST_RESIDENT:
                raise ValueError(f"{resident:.0%} of the files stayed in the page cache")
            found.setdefault(f"{name} load", []).append(_timed(partial(_load, name, state, place)))
            _check(state, layout, rank, ranks)
            dist.barrier()
            if rank == 0:
                disk.remove(place)
            dist.barrier()
    dist.destroy_process_group()
    return found


def _timed(operation: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    operation()
    dist.barrier()
    return time.perf_counter() - start


def _save(name: str, state: Any, place: Path) -> None:
    """Save durably. Each library has its default settings, except for the number of threads."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import limpet

    if name == "limpet":
        limpet.save(str(place), state, step=1)
        return
    threads = 4 if name.endswith("threads") else 1
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(place), thread_count=threads))
    if dist.get_rank() == 0:
        disk.fsync_tree(place)


def _load(name: str, state: Any, place: Path) -> None:
    import torch.distributed.checkpoint as dcp

    import limpet

    if name == "limpet":
        limpet.load(str(place), into=state)
    else:
        dcp.load(state, checkpoint_id=str(place))


def _make_state(size: int, layout: str, rank: int, ranks: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from bench import states

    state = states.large_state(size)
    if layout == "replicated":
        return state
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        key: DTensor.from_local(value.chunk(ranks)[rank].clone(), mesh, [Shard(0)])
        for key, value in state.items()
    }


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _check(state: dict[str, Any], layout: str, rank: int, ranks: int) -> None:
    """Check the values that were loaded, without a second copy of the state."""
    import torch

    from bench import states

    base = states.base_tensor()
    if layout == "sharded":
        base = base.chunk(ranks)[rank]
    wrong = [
        key
        for i, (key, value) in enumerate(state.items())
        if not torch.equal(_local(value), base + i / 64)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(state)} tensors have wrong values")


def _measure_ranks(options: Options, layout: str, ranks: int) -> Samples:
    """Run ``measure`` in a process for each rank. Raises ``MeasurementFailed``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = options.folder / f"{layout}-{ranks}"
    folder.mkdir()
    rounds = 1 if options.quick else 3
    try:
        with ThreadPoolExecutor(ranks) as team:
            running = [
                team.submit(
                    fresh_process.call, "bench.distributed:measure", 300, rank=rank, ranks=ranks,
                    port=port, folder=str(folder), size=options.medium, layout=layout,
                    rounds=rounds,
                )
                for rank in range(ranks)
            ]  # fmt: skip
            results = [each.result() for each in running]
        return results[0]
    finally:
        disk.remove(folder)


def sections(options: Options) -> list[Section]:
    found: dict[tuple[str, int], Samples] = {}
    missing = []
    raw = fresh_process.call(
        "bench.disk:measure_raw", folder=str(options.folder), size=options.medium,
        writers=[4, 6], readers=[4, 6],
    )  # fmt: skip
    floors = {operation: min(seconds.values()) for operation, seconds in raw.items()}
    for layout in LAYOUTS:
        for ranks in RANKS:
            try:
                found[layout, ranks] = _measure_ranks(options, layout, ranks)
            except fresh_process.MeasurementFailed as failure:
                missing.append(f"{layout}, {ranks} ranks: {failure}")
    verdicts = [
        _verdict(found.get((layout, ranks), {}), layout, operation, ranks, floors[operation])
        for layout, operation in TARGETS
        for ranks in RANKS
    ]
    rows = [
        [
            f"{layout}, {ranks} ranks", operation, name, f"{min(values):.2f}",
            f"{median(values):.2f}", spread(values),
        ]
        for (layout, ranks), samples in found.items()
        for operation in ("save", "load")
        for name in LIBRARIES
        for values in [samples[f"{name} {operation}"]]
    ]  # fmt: skip
    rows += [
        ["raw O_DIRECT, one process", operation, "", f"{seconds:.2f}", "", ""]
        for operation, seconds in floors.items()
    ]
    columns = ["state", "", "library", "best, s", "median, s", "range"]
    size = f"{options.medium >> 20} MiB"
    return [Section(f"Real ranks on one host, {size}", _TEXT, verdicts, columns, rows, missing)]


def _verdict(samples: Samples, layout: str, operation: str, ranks: int, floor: float) -> Verdict:
    """Compare Limpet with the better DCP, round by round. ``floor``: the seconds of the disk."""
    ours, *others = [samples.get(f"{name} {operation}", []) for name in LIBRARIES]
    ratios = [min(theirs) / mine for mine, *theirs in zip(ours, *others, strict=True)]
    label = f"{layout} {operation}, {ranks} ranks: speed / better DCP"
    verdict = judge(label, ratios, least=TARGETS[layout, operation])
    room = 0.85 * min(map(median, others)) / floor if ratios else 0.0
    if verdict.reached == NO and room < (TARGETS[layout, operation] or 0.0):
        return replace(verdict, reached=f"not possible: 0.85 of the raw disk is {room:.1f} x")
    return verdict


_TEXT = (
    "Processes with gloo. Replicated: "
    + LAYOUTS["replicated"]
    + ". Sharded: "
    + LAYOUTS["sharded"]
    + ". The size is that of the whole state. Seconds from a barrier until all ranks have finished;"
    " a save until the files and folders are synced, a load after the files' pages were dropped"
    " (checked with mincore), into live tensors, which are compared afterward. The libraries take"
    " turns within each of three rounds. DCP writes with 1 and with 4 threads; each ratio is to the"
    " faster of the two in the same round. The raw disk is read and written once with 4 and once"
    " with 6 threads; the faster one counts."
)
