"""Topic: shared reads. Four ranks of a host load together, compared with four independent loads."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from bench import disk, fresh_process, states
from bench.report import Options, Section, judge, spread
from bench.resource_usage import own_cpu_seconds
from bench.s3_server import BUCKET, connection_to, real_server
from bench.s3_sink import running_sink

RANKS = 4
RATE = 200_000_000
LAYOUTS = {
    "replicated": "every rank has the whole state, as with DDP",
    "sharded": "saved and loaded as an equal part of each tensor's rows, as with FSDP2",
    "3 to 4 ranks": "saved as rows by 3 ranks, loaded as rows by 4",
    "columns to rows": "saved as columns by 4 ranks, as with tensor parallelism, loaded as rows",
}
_SHAPE = (2048, 4096)
_WAYS = {"shared": None, "independent": "alone"}

Samples = dict[str, list[float]]


def measure(rank: int, port: int, place: dict[str, Any], size: int, rounds: int,
            ) -> dict[str, Samples]:  # fmt: skip
    """Return the seconds, CPU seconds, bytes and requests of each load by layout, as one of the
    ranks. ``place``: the arguments of ``limpet.open_store``. Runs in a child process."""
    import torch
    import torch.distributed as dist

    import limpet

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kv = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=kv, rank=rank, world_size=RANKS)
    tiny = limpet.open_store(**{**place, "url": f"{place['url']}/tiny"})
    read_bytes = _count_bytes(type(tiny))
    limpet.save(tiny, states.small_state(2))
    limpet.load(tiny, into=states.small_state(2))
    found: dict[str, Samples] = {}
    for n, layout in enumerate(LAYOUTS):
        store = limpet.open_store(**{**place, "url": f"{place['url']}/{n}"})
        limpet.save(store, _make_state(layout, size, rank, saved=True))
        state = _make_state(layout, size, rank, saved=False)
        samples = found[layout] = {}
        for number in range(rounds):
            for way in list(_WAYS)[:: 1 if number % 2 == 0 else -1]:
                for value in state.values():
                    value.tensor.fill_(-1.0)
                if rank == 0 and "://" not in place["url"]:
                    disk.drop_page_cache(Path(place["url"]))
                dist.barrier()
                requests, nbytes, cpu = _requests(store), sum(read_bytes), own_cpu_seconds()
                start = time.perf_counter()
                limpet.load(store, into=state, group=_WAYS[way])
                dist.barrier()
                taken = {"s": time.perf_counter() - start, "cpu": own_cpu_seconds() - cpu}
                taken["bytes"] = float(sum(read_bytes) - nbytes)
                taken["requests"] = float(_requests(store) - requests)
                for name, figure in taken.items():
                    samples.setdefault(f"{way} {name}", []).append(figure)
                _check(state, layout, rank)
    dist.destroy_process_group()
    return found


def _count_bytes(kind: Any) -> list[int]:
    """Make a class of stores count the bytes of its reads. Return the list of them."""
    # where there are long reads, ``get_range`` is one of them
    name = "open_range" if hasattr(kind, "open_range") else "get_range"
    original, counts = getattr(kind, name), list[int]()

    def count(store: Any, key: str, offset: int, length: int, *views: memoryview) -> Any:
        counts.append(length)
        return original(store, key, offset, length, *views)

    setattr(kind, name, count)
    return counts


def _requests(store: Any) -> int:
    return sum(store.statistics().requests.values()) if hasattr(store, "statistics") else 0


def _place(layout: str, rank: int, *, saved: bool) -> tuple[slice, slice]:
    """Return the rows and columns of each tensor that a rank saves or loads."""
    rows, columns = _SHAPE
    if layout == "replicated":
        return slice(0, rows), slice(0, columns)
    if saved and layout == "columns to rows":
        return slice(0, rows), slice(columns * rank // RANKS, columns * (rank + 1) // RANKS)
    parts = 3 if saved and layout == "3 to 4 ranks" else RANKS
    return slice(rows * min(rank, parts) // parts, rows * min(rank + 1, parts) // parts), slice(
        0, columns
    )


def _make_state(layout: str, size: int, rank: int, *, saved: bool) -> dict[str, Any]:
    import limpet

    place = _place(layout, rank, saved=saved)
    offsets = (place[0].start, place[1].start)
    base = states.base_tensor().reshape(_SHAPE)[place]
    return {
        f"layers.{i:02}.weight": limpet.Boxed(base + i / 64, offsets, _SHAPE)
        for i in range(size // states.TENSOR_BYTES)
    }


def _check(state: dict[str, Any], layout: str, rank: int) -> None:
    import torch

    base = states.base_tensor().reshape(_SHAPE)[_place(layout, rank, saved=False)]
    for i, value in enumerate(state.values()):
        if not torch.equal(value.tensor, base + i / 64):
            raise ValueError("a tensor has wrong values")


def _measure_ranks(place: dict[str, Any], size: int, rounds: int) -> dict[str, Samples]:
    """Run ``measure`` in a process for each rank. Return the seconds of rank 0, and the sums of all
    else. Raises ``MeasurementFailed``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(RANKS) as team:
        running = [
            team.submit(
                fresh_process.call, "bench.shared_reads:measure", 400, rank=rank, port=port,
                place=place, size=size, rounds=rounds,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        results: list[dict[str, Samples]] = [each.result() for each in running]
    combined: dict[str, Samples] = {}
    for layout, first in results[0].items():
        combined[layout] = {
            name: values
            if name.endswith(" s")
            else [sum(each) for each in zip(*(r[layout][name] for r in results), strict=True)]
            for name, values in first.items()
        }
        for way in _WAYS:
            if min(combined[layout][f"{way} bytes"]) < size:
                raise fresh_process.MeasurementFailed(f"{layout}: reads were not counted")
    return combined


@contextmanager
def _sink(rate: int) -> Iterator[dict[str, Any]]:
    with running_sink(rate) as endpoint:
        yield {"url": "s3://keep", **connection_to(endpoint)}


@contextmanager
def _ceph() -> Iterator[dict[str, Any]]:
    with real_server("ceph") as connection:
        yield {"url": f"s3://{BUCKET}", **connection}


def _section(title: str, found: dict[str, Samples], missing: list[str], text: str) -> Section:
    verdicts, rows = [], []
    for layout, samples in found.items():
        pairs = zip(samples["independent s"], samples["shared s"], strict=True)
        verdicts.append(judge(f"{layout}: speed / independent loads", [a / b for a, b in pairs]))
        for way in _WAYS:
            middle = {n: median(samples[f"{way} {n}"]) for n in ("s", "cpu", "bytes", "requests")}
            rows.append(
                [
                    layout, way, f"{middle['s']:.2f}", spread(samples[f"{way} s"]),
                    f"{middle['cpu']:.2f}", f"{middle['bytes'] / states.MIB:.0f}",
                    f"{middle['requests']:.0f}" if middle["requests"] else "-",
                ]
            )  # fmt: skip
    columns = ["state", "loads", "median, s", "range", "CPU, s", "MiB read", "requests"]
    return Section(title, text, verdicts, columns, rows, missing)


def sections(options: Options) -> list[Section]:
    size, rounds = options.medium // 4, 1 if options.quick else 3
    local = {"url": str(options.folder / "shared_reads")}
    stores: dict[str, AbstractContextManager[dict[str, Any]]] = {
        "a local folder": nullcontext(local),
        "S3 on loopback": _sink(0),
        f"S3, {RATE // 1_000_000} MB/s": _sink(RATE),
        "Ceph on the same machine": _ceph(),
    }
    made = []
    for name, opened in stores.items():
        found: dict[str, Samples] = {}
        missing = []
        try:
            with opened as place:
                found = _measure_ranks(place, size, rounds)
        except Exception as failure:  # noqa: BLE001  (reported: Ceph is not installed, or failed)
            missing.append(f"{type(failure).__name__}: {failure}")
        title = f"Reads of {RANKS} ranks from {name}, {size // states.MIB} MiB"
        made.append(_section(title, found, missing, _TEXT if not made else "The same loads."))
    disk.remove(Path(local["url"]))
    return made


_TEXT = (
    f"{RANKS} processes load at the same time: together, or independently (group='alone'). "
    + " ".join(f"{name}: {meaning}." for name, meaning in LAYOUTS.items())
    + " The two take turns; seconds are from a barrier until all have finished. CPU seconds, bytes"
    " of shards and indexes, and requests are the sums of all processes. The limited server sends"
    " no more bytes per second on all connections together, as a network does."
)
