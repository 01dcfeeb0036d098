"""Topic: embedding tables, compared with torch.nn.EmbeddingBag and with dense arrays of the same
bytes.

Each measurement is a function that runs in a process of its own; what it compares runs in turn in
that process, with one thread of torch. Other programs on the machine change elapsed times more than
processor times, so computation is judged by these.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import disk, fresh_process, growth, resource_usage
from bench.report import Options, Section, judge

_EXAMPLES, _FEATURES = 8192, 26
_DIM, _SMALL_DIM = 64, 8
_MIB, _MILLION = 1 << 20, 1_000_000
_MOST_SECONDS = 200

Array = np.ndarray[Any, Any]
Seconds = dict[str, list[float]]


# -- tables and batches ----------------------------------------------------------------------------


def batches(rows: int, count: int) -> list[Array]:
    """Return batches of numbers below ``rows``, int64 ``[8192 * 26]``. The probability of k is
    about 1 / (k + 1) ** 1.05 (by the inverse of the continuous distribution)."""
    generator = np.random.default_rng(7)
    low, high = 1.0, float(rows + 1) ** -0.05
    uniform = (generator.random(_EXAMPLES * _FEATURES) for _ in range(count))
    found = [(low + u * (high - low)) ** -20 for u in uniform]
    return [np.minimum(each, rows).astype(np.int64) - 1 for each in found]


def ids_of(numbers: Array) -> Array:
    """Return 64-bit ids of numbers: other ids for other numbers."""
    ids: Array = numbers * np.int64(0x1E3779B97F4A7C15)
    return ids


def make_servers(
    optimizer: str, rows: int, *, dim: int = _DIM, count: int = 1, engine: Any = "local"
) -> Any:
    """Return servers of a table "words" with the rows of the first ``rows`` numbers."""
    from limpet import tables

    words = tables.Table("words", dim, optimizer=getattr(tables, optimizer)(lr=0.01))
    servers = tables.Servers([words], count, engine=engine)
    add_rows(servers, 0, rows, dim)
    return servers


def add_rows(servers: Any, first: int, stop: int, dim: int = _DIM) -> None:
    import torch

    for start in range(first, stop, 1 << 18):
        ids = ids_of(np.arange(start, min(start + (1 << 18), stop)))
        servers.fill("words", ids, torch.full((len(ids), dim), 0.01))


def row_bytes(optimizer: str, dim: int = _DIM, *, is_stored: bool = False) -> int:
    """Return the bytes of the id, the values, and the slots of a row, and if ``is_stored`` also of
    its count and last step."""
    slots = {"SGD": 0, "Adagrad": dim, "Adam": 2 * dim + 1}[optimizer]
    return 8 + 4 * (dim + slots) + (12 if is_stored else 0)


def update(servers: Any, module: Any, numbers: Array) -> float:
    """Pull, compute a gradient, and push; return the seconds of the push."""
    import torch

    module(torch.from_numpy(ids_of(numbers)).view(-1, _FEATURES)).sum().backward()
    start = time.perf_counter()
    servers.step()
    return time.perf_counter() - start


def _in_turn(ways: dict[str, Callable[[Array], object]], inputs: list[Array]) -> dict[str, Seconds]:
    """Call each way with each input, in alternating order. Return the processor time of the process
    and the elapsed time of each call by way, without the first round."""
    found: dict[str, Seconds] = {way: {"cpu": [], "wall": []} for way in ways}
    for number, each in enumerate(inputs):
        for way in [*ways][:: 1 - 2 * (number % 2)]:
            cpu, wall = time.process_time(), time.perf_counter()
            ways[way](each)
            if number:
                found[way]["cpu"].append(time.process_time() - cpu)
                found[way]["wall"].append(time.perf_counter() - wall)
    return found


# -- measurements, each in a child process ---------------------------------------------------------


def measure_updates(
    optimizer: str, rows: int, rounds: int, dim: int = _DIM, count: int = 1
) -> dict[str, dict[str, Seconds]]:
    """Return the times of a pull and a push with the forward and backward pass: of
    torch.nn.EmbeddingBag with its optimizer, of the public calls, and of those of a shard. By shape
    of the batch: one bag per id, and one per example."""
    import torch
    from torch.nn import functional

    from limpet import tables
    from limpet.tables.ids import unique

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    servers = make_servers(optimizer, rows, dim=dim, count=count)
    module, shard = tables.EmbeddingBag(servers, "words", mode="sum"), None
    if count == 1:
        shard = servers.servers[0].shards["words"]
    weight = torch.full((rows, dim), 0.01)
    dense = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight)
    kinds = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.SparseAdam}
    dense_optimizer = kinds[optimizer](dense.parameters(), lr=0.01)

    def use_torch(numbers: Array) -> None:
        dense(torch.from_numpy(numbers).view(shape)).backward(gradient)
        dense_optimizer.step()
        dense_optimizer.zero_grad()

    def use_public_calls(numbers: Array) -> None:
        module(torch.from_numpy(ids_of(numbers)).view(shape)).backward(gradient)
        servers.step()

    def use_shard(numbers: Array) -> None:
        distinct, inverse = unique(ids_of(numbers))
        vectors = shard.look_up(distinct).requires_grad_()
        places = torch.from_numpy(inverse).view(shape)
        if shape[1] == 1:
            functional.embedding(places[:, 0], vectors).backward(gradient)
        else:
            functional.embedding_bag(places, vectors, mode="sum").backward(gradient)
        shard.push(distinct, vectors.grad, lr=0.01, step=1)

    ways = {"torch": use_torch, "public": use_public_calls}
    if shard is not None:
        ways["shard"] = use_shard
    found = {}
    for name, shape in {"one id": (-1, 1), "26 ids": (-1, _FEATURES)}.items():
        inputs = batches(rows, rounds + 1)
        bags = len(inputs[0]) // abs(shape[1])
        gradient = torch.full((bags, dim), 0.01)
        found[name] = _in_turn(ways, inputs)
    return found


def measure_memory(folder: str, rows: int) -> dict[str, float]:
    """Return the memory divided by the payload: the largest ratio while rows are added, and the one
    after that; and the peak in bytes and in payloads during a save, while rows are updated."""
    import torch

    import limpet
    from limpet import tables

    torch.set_num_threads(1)
    servers = make_servers("Adagrad", 0)
    module = tables.EmbeddingBag(servers, "words", mode="sum")
    update(servers, module, np.arange(_FEATURES))
    limpet.save(Path(folder) / "tiny", {"tables": servers})  # imports what a save needs
    ratios, block = [], 256 * _FEATURES
    rows -= rows % block
    with resource_usage.PeakMemory() as memory:
        for stop in range(block, rows + 1, block):
            update(servers, module, np.arange(stop - block, stop))
            if stop >= rows // 4:  # before, 30 MiB of libraries and temporaries count for much
                ratios.append(memory.peak_bytes() / (stop * row_bytes("Adagrad")))
        start = memory.resident_bytes()
    held = start / (rows * row_bytes("Adagrad"))
    inputs = batches(rows, 8)
    with resource_usage.PeakMemory() as memory:
        pending = limpet.save_async(Path(folder) / "save", {"tables": servers})
        count = 0
        while not pending.done or not count:
            update(servers, module, inputs[count % len(inputs)])
            count += 1
        pending.wait()
        peak = start + memory.peak_bytes()
    payload = rows * row_bytes("Adagrad")
    return {
        "growing": max(ratios), "held": held, "beyond": (peak - 1.25 * payload) / _MIB,
        "saving": peak / payload, "updates": count,
    }  # fmt: skip


def measure_save(folder: str, rows: int, rounds: int) -> dict[str, Seconds]:
    """Return the seconds of saves and of cold loads of a table with Adagrad, and of dense arrays
    of the same bytes, in turn."""
    import torch

    import limpet

    place = Path(folder)
    table = {"tables": make_servers("Adagrad", rows)}
    shapes = {"ids": (torch.int64, ()), "values": (torch.float32, (_DIM,)),
              "sum": (torch.float32, (_DIM,)), "counts": (torch.int32, ()),
              "last_steps": (torch.int64, ())}  # fmt: skip
    dense = {name: torch.ones((rows, *tail), dtype=dtype) for name, (dtype, tail) in shapes.items()}
    found: dict[str, Seconds] = {what: {"table": [], "dense": []} for what in ("save", "load")}
    states = {"table": table, "dense": dense}
    for number in range(rounds + 1):
        for name in [*states][:: 1 - 2 * (number % 2)]:
            start = time.perf_counter()
            limpet.save(place / name, states[name])
            found["save"][name].append(time.perf_counter() - start)
        for name in [*states][:: 1 - 2 * (number % 2)]:
            disk.drop_page_cache(place / name)
            start = time.perf_counter()
            limpet.load(place / name, into=states[name])
            found["load"][name].append(time.perf_counter() - start)
            disk.remove(place / name)
    return {what: {name: times[1:] for name, times in each.items()} for what, each in found.items()}


def measure_increments(folder: str, rows: int, rounds: int) -> dict[str, list[float]]:
    """Return what is written divided by the bytes of the rows that changed, and the seconds from
    ``save`` to the commit, for a table with ``rows`` rows and one with four times as many, whose
    updates are the same."""
    import torch

    import limpet
    from limpet import tables

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"bytes": [], "small": [], "large": []}
    found |= {"opening": [], "publication": []}
    inputs = batches(rows, rounds + 1)
    with contextlib.ExitStack() as stack:
        trainings = {}
        for name, count in {"small": rows, "large": 4 * rows}.items():
            servers = make_servers("Adagrad", count)
            ckpt = limpet.Checkpointer(
                Path(folder) / name, {"tables": servers}, save=limpet.Never(), incremental=10**6
            )
            stack.enter_context(ckpt)
            module = tables.EmbeddingBag(servers, "words", mode="sum")
            trainings[name] = servers, module, ckpt
            ckpt.step()
            ckpt.save()
        views: dict[str, Any] = {}
        for number, numbers in enumerate(inputs):
            for name in [*trainings][:: 1 - 2 * (number % 2)]:
                servers, module, ckpt = trainings[name]
                update(servers, module, numbers)
                ckpt.step()
                start = time.perf_counter()
                snapshot = ckpt.save()
                seconds = time.perf_counter() - start
                changed = len(np.unique(numbers))
                start = time.perf_counter()
                if number == 0:
                    views[name] = tables.open(f"{folder}/{name}@latest")
                    what, count = "opening", servers.statistics()["words"]["rows"]
                else:
                    found[name].append(seconds)
                    found["bytes"].append(snapshot.nbytes / changed / row_bytes("Adagrad"))
                    start = time.perf_counter()
                    views[name].follow()
                    what, count = "publication", changed
                seconds = time.perf_counter() - start
                found[what].append(count * (8 + 4 * _DIM) / seconds / 1e9)
    return found


def measure_reads(folder: str, rows: int) -> dict[str, list[float]]:
    """Return for each server of a restore the bytes that it reads, divided by those of its rows,
    by the numbers of servers that save and restore."""
    import limpet
    from limpet import tables
    from limpet.run.address import open_reader
    from limpet.tables.member import TableMember
    from limpet.tables.server import TableServer

    found = {}
    for saving, restoring in ((1, 3), (4, 3), (3, 5)):
        place = Path(folder) / f"{saving}"
        limpet.save(place, {"tables": make_servers("Adagrad", rows, count=saving)})
        ratios = []
        for number in range(restoring):
            words = tables.Table("words", _DIM, optimizer=tables.Adagrad(lr=0.01))
            server = TableServer([words], range(0))
            member = TableMember([words], [server], first=number, count=restoring)
            before = _read_bytes()
            member.restore(open_reader(place), "tables")
            count = server.shards["words"].statistics()["rows"]
            read = _read_bytes() - before
            ratios.append(read / (count * row_bytes("Adagrad", is_stored=True)))
        disk.remove(place)
        found[f"{saving} to {restoring}"] = ratios
    return found


def _read_bytes() -> int:
    """Return the bytes that this process has read with system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def measure_pushes_during_saves(folder: str, rows: int, saves: int) -> dict[str, list[float]]:
    """Return the seconds of pushes with and without a save of all rows at the same time."""
    import torch

    import limpet
    from limpet import tables

    torch.set_num_threads(1)
    servers = make_servers("Adagrad", rows)
    module = tables.EmbeddingBag(servers, "words", mode="sum")
    inputs = batches(rows, 40)
    found: dict[str, list[float]] = {"alone": [], "during": []}
    for _ in range(saves):
        found["alone"] += [update(servers, module, each) for each in inputs[:10]]
        pending, at = limpet.save_async(Path(folder) / "save", {"tables": servers}), 0
        while not pending.done:
            found["during"].append(update(servers, module, inputs[at % len(inputs)]))
            at += 1
        pending.wait()
        disk.remove(Path(folder) / "save")
    return found


def measure_growth(folder: str, sizes: list[int]) -> dict[str, list[float]]:
    """Return the processor seconds of calls for a table of dim 8 that has grown to each size."""
    import torch

    import limpet
    from limpet import tables

    torch.set_num_threads(1)
    # memory that the host of a virtual machine has to provide first takes far longer
    np.ones(sizes[-1] * 3 * row_bytes("Adagrad", _SMALL_DIM, is_stored=True), np.uint8)
    servers = make_servers("Adagrad", 1, dim=_SMALL_DIM)
    module = tables.EmbeddingBag(servers, "words")
    gradient, inputs = torch.ones(1 << 17, _SMALL_DIM), batches(sizes[0], 10)
    found: dict[str, list[float]] = {}
    create, at = 0.0, 1
    for size in sizes:
        start = time.process_time()
        while at < size:
            ids = ids_of(np.arange(at, min(at + len(gradient), size)))
            # by way of the servers: a load makes new shards, and releases the old ones
            shards = servers.servers[0].shards
            shards["words"].push(ids, gradient[: len(ids)], lr=0.01, step=1)
            at += len(ids)
        create += time.process_time() - start
        times = []
        for numbers in inputs:
            start = time.process_time()
            update(servers, module, numbers * (size // sizes[0]))
            times.append(time.process_time() - start)
        seconds = {"new rows, by their gradients": create, "a step of 212,992 ids": min(times)}
        state, place = {"tables": servers}, Path(folder) / "grown"
        start = time.process_time()
        limpet.save(place, state)
        seconds["save of all rows"] = time.process_time() - start
        times = []
        for _ in range(3):  # the first ones may get memory that the host has to provide
            start = time.process_time()
            limpet.load(place, into=state)
            times.append(time.process_time() - start)
        seconds["load of all rows"] = min(times)
        disk.remove(place)
        for what, each in seconds.items():
            found.setdefault(what, []).append(each)
    return found


def measure_ray(folder: str, rows: int, rounds: int) -> dict[str, dict[str, Seconds]]:
    """Return the times of pulls of the distinct ids of a batch from a server on Ray, and of calls
    of a bare actor with the same argument that returns an array of the same bytes."""
    import ray
    import torch

    torch.set_num_threads(1)
    ray.init(
        num_cpus=2, object_store_memory=256 * _MIB, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR", _temp_dir=f"{folder}/ray",
    )  # fmt: skip

    class Bare:
        vectors = np.ones((_EXAMPLES * _FEATURES, _DIM), np.float32)

        def get(self, ids: Array) -> Array:
            return self.vectors[: len(ids)]

    bare: Any = ray.remote(num_cpus=0)(Bare).remote()
    servers = make_servers("Adagrad", rows, engine="ray")
    found = _in_turn(
        {
            "bare": lambda ids: ray.get(bare.get.remote(ids)).sum(),
            "table": lambda ids: servers.lookup("words", ids).sum(),
        },
        [np.unique(ids_of(each)) for each in batches(rows, rounds + 1)],
    )
    servers.close()
    ray.shutdown()
    return {"pull": found}


# -- the report ------------------------------------------------------------------------------------


def _ratios(found: dict[str, Seconds], way: str, kind: str = "cpu") -> list[float]:
    pairs = zip(found[way][kind], found["torch"][kind], strict=True)
    return [ours / theirs for ours, theirs in pairs]


def _updates(options: Options) -> Section:
    small = 100_000 if options.quick else _MILLION
    sizes = {"SGD": 10 * small, "Adagrad": 10 * small, "Adam": 4 * small}
    section = Section(
        "Tables: pull and push",
        f"A step with {_EXAMPLES:,} x {_FEATURES} zipf ids: pull, forward and backward pass, push;"
        " against torch.nn.EmbeddingBag(sparse=True) with the optimizer of torch (Adam:"
        f" SparseAdam). Dim {_DIM}; "
        + ", ".join(f"{name} {rows / _MILLION:g} million rows" for name, rows in sizes.items())
        + f"; the other tables of the list {small / _MILLION:g} million rows. Processor time, in"
        " turn in one process with one thread. The bags have one id each, or the ids of an example."
        " public: EmbeddingBag and Servers.step; shard: the calls of one server.",
        [],
        ["table", "bags", "torch", "public", "shard", "public, elapsed"],
    )
    rounds = 4 if options.quick else 10
    cases = [(name, rows, _DIM, 1) for name, rows in sizes.items()]
    cases += [("Adagrad", small, _SMALL_DIM, 1)]
    cases += [("Adagrad", small, _DIM, count) for count in range(1, 5)]
    for number, (name, rows, dim, count) in enumerate(cases):
        times = rounds if number < len(sizes) else rounds // 2
        arguments = {"optimizer": name, "rows": rows, "rounds": times, "dim": dim, "count": count}
        label = f"{name}, {rows / _MILLION:g} M rows, dim {dim}, {count} server{'s' * (count > 1)}"
        try:
            found = fresh_process.call("bench.tables:measure_updates", _MOST_SECONDS, **arguments)
        except fresh_process.MeasurementFailed as failure:
            section.missing.append(f"{label}: {failure}")
            continue
        for bags, times in found.items():
            cells = [
                f"{1000 * median(times[way][kind]):.0f} ms" if way in times else "-"
                for way, kind in (("torch", "cpu"), ("public", "cpu"), ("shard", "cpu"),
                                  ("public", "wall"))
            ]  # fmt: skip
            section.rows.append([label, bags, *cells])
            most = (1.1 if name == "SGD" else 0.9) if number < len(sizes) else None
            for way in ("public", "shard")[: 2 if most else 1]:
                what = f"{label if most is None else name}, {bags} per bag, {way} / torch"
                section.verdicts.append(judge(what, _ratios(times, way), most=most))
    return section


def _storage(options: Options) -> Section:
    folder, quick = options.folder / "tables", options.quick
    rows = _MILLION // 10 if quick else 2 * _MILLION
    gib = rows * row_bytes("Adagrad", is_stored=True) / 2**30
    section = Section(
        "Tables: memory and versions",
        f"Tables with Adagrad, {rows / _MILLION:g} million rows of dim {_DIM} ({gib:.1f} GiB)."
        " Payload: ids, values, and slots. Memory is the high-water mark of resident memory of a"
        " process. Saves are durable and loads are cold; the dense arrays have the same bytes, and"
        " are saved and loaded in turn. Increments have the rows of one batch, in a table of"
        f" {rows // 2 / _MILLION:g} million rows and one of {2 * rows / _MILLION:g} million rows.",
        [],
    )

    def measure(function: str, **arguments: Any) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        call = f"bench.tables:{function}"
        try:
            return fresh_process.call(call, _MOST_SECONDS, **{"folder": str(folder)} | arguments)
        except fresh_process.MeasurementFailed as failure:
            section.missing.append(f"{function}: {failure}")
            return {}
        finally:
            disk.remove(folder)

    def add(name: str, values: list[float], **bounds: Any) -> None:
        section.verdicts.append(judge(name, values, **bounds))

    runs = [measure("measure_memory", rows=2 * rows) for _ in range(1 if quick else 2)]
    peaks = {name: [run[name] for run in runs if run] for name in ("growing", "held", "saving")}
    beyond = [run["beyond"] for run in runs if run]
    add(
        "memory / payload, most while 3/4 of the rows are added",
        peaks["growing"],
        most=1.15,
    )
    add("memory / payload, afterward", peaks["held"], most=1.15)
    add("memory / payload during a save", peaks["saving"])
    add("memory beyond 1.25 payloads during a save", beyond, most=256, unit="MiB", digits=0)

    rounds = 1 if quick else 5
    found = measure("measure_save", rows=rows, rounds=rounds)
    for what, least in {"save": 0.75, "load": 0.6}.items():
        times = found.get(what, {"table": [], "dense": []})
        ratios = [b / a for a, b in zip(times["table"], times["dense"], strict=True)]
        add(f"{what} of all rows: speed / dense arrays", ratios, least=least)
        for name, each in times.items():
            add(f"{what}, {name}", [gib / seconds for seconds in each], unit="GiB/s")

    found = measure("measure_increments", rows=rows // 2, rounds=2 if quick else 6)
    small, large = found.get("small", []), found.get("large", [])
    add("increment: bytes / those of changed rows", found.get("bytes", []), most=1.1, digits=3)
    ratios = [b / a for a, b in zip(small, large, strict=True)]
    add("increment: time, table 4 x as large", ratios, most=1.2)
    add("increment of the smaller table", [1000 * s for s in small], unit="ms", digits=0)
    for name, what in {
        "opening": "tables.open",
        "publication": "View.follow, an increment",
    }.items():
        add(f"{what}: ids and values", found.get(name, []), unit="GB/s")

    for name, ratios in measure("measure_reads", rows=rows).items():
        what = f"bytes that a server reads / those of its rows, {name} servers"
        add(what, ratios, most=1.1, digits=3)

    found = measure("measure_pushes_during_saves", rows=rows, saves=1 if quick else 3)
    for name, label in {"alone": "without a save", "during": "during a save"}.items():
        times = [1000 * seconds for seconds in found.get(name, [])]
        add(f"push {label}, median", times, unit="ms", digits=0)
        add(f"push {label}, largest", [max(times)] if times else [], unit="ms", digits=0)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        # the paths of Ray's sockets have at most 107 characters
        found = measure("measure_ray", folder=short, rows=rows // 2, rounds=4 if quick else 20)
    if found:
        times = found["pull"]
        pairs = zip(times["table"]["wall"], times["bare"]["wall"], strict=True)
        add("pull through Ray: time / a bare call", [a / b for a, b in pairs], most=1.5)
        pulls = [1000 * seconds for seconds in times["table"]["wall"]]
        add("pull through Ray", pulls, unit="ms", digits=0)
    return section


def _growth(options: Options) -> Section:
    sizes = [each * _MILLION // (100 if options.quick else 1) for each in (1, 4, 16)]
    section = Section(
        "Tables: growth of cost",
        f"Processor time with {', '.join(f'{size / _MILLION:g}' for size in sizes)} million rows of"
        f" dim {_SMALL_DIM} with Adagrad, of all threads. Exponent: as in the growth of cost of all"
        " calls.",
        [],
        ["call", *(f"{size / _MILLION:g} M rows" for size in sizes)],
    )
    options.folder.joinpath("tables").mkdir(exist_ok=True)
    try:
        found = fresh_process.call(
            "bench.tables:measure_growth", _MOST_SECONDS,
            folder=str(options.folder / "tables"), sizes=sizes,
        )  # fmt: skip
    except fresh_process.MeasurementFailed as failure:
        section.missing.append(str(failure))
        return section
    finally:
        disk.remove(options.folder / "tables")
    for name, seconds in found.items():
        exponent = growth.exponent(sizes, seconds)
        section.verdicts.append(judge(f"exponent: {name}", [exponent], most=growth.MOST, unit=""))
        section.rows.append([name, *(f"{each:.3f} s" for each in seconds)])
    return section


def sections(options: Options) -> list[Section]:
    return [_updates(options), _storage(options), _growth(options)]
