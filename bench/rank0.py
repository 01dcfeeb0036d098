"""Time rank 0 of a save by many ranks: the library's own code over a real TCPStore."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import msgspec
import numpy as np

PROCESSES = 2
POLLING_CLIENTS = 4
UNCHANGED_SAVES = 5
COMMITS = 3


class Timings:
    """Seconds by name. A section inside another section counts for both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    def wrap(self, name: str, call: Any) -> Any:
        def do(*given: Any, **named: Any) -> Any:
            with self.section(name):
                return call(*given, **named)

        return do

    def pop_seconds(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


@contextmanager
def timed_steps(timings: Timings) -> Iterator[None]:
    """Time the steps of the partition and of the commit."""
    from limpet.ranks.collective import StoreCollective
    from limpet.saving import commit, partition

    chair, assembly = partition._Coordinator, StoreCollective
    steps = [
        (chair, "collect", "plan"), (chair, "merge_trees", "merge"),
        (chair, "encode_masks", "masks"),
        (assembly, "gather", "gather"), (assembly, "scatter", "scatter"),
        (assembly, "_wait_for_keys", "waited"),
        (commit, "seal", "manifest"), (commit, "check_tree", "manifest"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, said in steps:
            call = timings.wrap(said, getattr(owner, name))
            if owner in (chair, assembly):
                stack.enter_context(mock.patch.object(owner, name, _as_method(call)))
            else:
                stack.enter_context(mock.patch.object(owner, name, call))
        yield


def _as_method(call: Any) -> Any:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return call(self, *given, **named)

    return method


def measure(ranks: int, shape: str, folder: str) -> dict[str, Any]:
    """Return all figures for one number of ranks and one shape of state.

    Runs in a child process.
    """
    with ExitStack() as stack:
        port = _start_store(stack)
        processes = []
        for first in range(1, min(PROCESSES, ranks - 1) + 1):
            given = {
                "port": port, "ranks": ranks, "shape": shape, "first": first, "step": PROCESSES,
                "folder": folder,
            }  # fmt: skip
            processes.append(
                stack.enter_context(_start_child("bench.simulated_ranks:run_ranks", **given))
            )
        return _Rank0(port, ranks, shape, Path(folder), processes).measure()


class _Rank0:
    def __init__(self, port: int, ranks: int, shape: str, folder: Path, processes: Any) -> None:
        from bench import simulated_ranks
        from limpet.buffers import shared_pool
        from limpet.ranks.group import Group
        from limpet.ranks.kv import KVClient, Timeouts
        from limpet.snapshot.location import locate

        self.ranks, self.shape, self.folder = ranks, shape, folder
        self.command_store = simulated_ranks.connect(port, counted=False)
        self.store = simulated_ranks.connect(port)
        self.kv = KVClient(self.store, 0, ranks, Timeouts())
        self.group = Group(self.kv, ranks)
        self.location = locate(folder)
        self.pool = shared_pool()
        self.number = 0
        self.processes = processes
        self.timings = Timings()
        self.receipt: Any = None
        self.manifest_bytes = 0

    def measure(self) -> dict[str, Any]:
        from bench.resource_usage import PeakMemory
        from bench.simulated_ranks import state_of
        from limpet.state.flatten import flatten

        flatten(state_of(0, self.ranks, self.shape))  # import everything before a save is timed
        self.kv.start()
        self.wait_for_count("simulated/ready")
        gc.collect()
        with timed_steps(self.timings):
            with PeakMemory() as memory:
                first = self.save(commit=True, write=True)
                peak = memory.peak_bytes() / 2**20
            with PeakMemory() as memory:
                again = [self.save() for _ in range(UNCHANGED_SAVES)]
                peak_again = memory.peak_bytes() / 2**20
            commits = [first]
            for _ in range(COMMITS - 1):
                (self.folder / "manifest.json").unlink()
                commits.append(self.save(commit=True))
        left, vigil = self.leftover_keys(), self.time_failure_detector()
        self.send_command("end")
        self.kv.close()
        return {
            "ranks": self.ranks, "shape": self.shape, "first": first, "again": again,
            "commits": commits, "peak_mib": peak, "peak_again_mib": peak_again, "left": left,
            "vigil_s": vigil, **self.file_sizes(), **self.measure_load(),
        }  # fmt: skip

    def send_command(self, operation: str, commit: bool = False, write: bool = False) -> None:
        from bench.simulated_ranks import SaveCommand

        self.number += 1
        order = msgspec.json.encode(SaveCommand(operation, commit, write))
        self.command_store.set(f"simulated/order/{self.number}", order)

    def wait_for_count(self, key: str) -> None:
        """Wait until each process of simulated ranks has incremented ``key``.

        Raises ``RuntimeError`` if one of them has ended.
        """
        while self.command_store.add(key, 0) < len(self.processes):
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError("a process of simulated ranks failed")
            time.sleep(0.001)

    def collect_reports(self) -> list[Any]:
        from bench.simulated_ranks import RanksReport

        self.wait_for_count(f"simulated/done/{self.number}")
        raws = [
            self.command_store.get(f"simulated/told/{self.number}/{i + 1}")
            for i in range(len(self.processes))
        ]
        return [msgspec.json.decode(raw, type=RanksReport) for raw in raws]

    def save(self, *, commit: bool = False, write: bool = False) -> dict[str, Any]:
        """Save without shards; return seconds of partition and commit, store calls, and bytes."""
        from bench.simulated_ranks import state_of
        from limpet.saving.partition import partition_state
        from limpet.state.flatten import flatten
        from limpet.threads import Workers, gc_paused

        what = f"the save of {self.location.url}"
        flat = flatten(state_of(0, self.ranks, self.shape))
        self.store.pop_counts()
        self.timings.pop_seconds()
        self.send_command(what, commit, write)
        began, cpu = time.perf_counter(), time.process_time()
        meeting = self.group.collective(what)
        with meeting:
            workers = Workers(self.pool, 2)
            dealt = gc_paused(partition_state)(meeting, self.group, flat, workers)
        figures: dict[str, Any] = {
            "agree_s": time.perf_counter() - began,
            "agree_cpu_s": time.process_time() - cpu,
            **{f"{name}_s": took for name, took in self.timings.pop_seconds().items()},
        }
        if commit:
            figures |= self.commit(dealt, meeting, write)
        meeting.close()
        calls, nbytes = self.store.pop_counts()
        told = self.collect_reports()
        return figures | {
            "calls": calls,
            "others_calls": sum(t.calls for t in told) / (self.ranks - 1),
            "nbytes": nbytes + sum(t.nbytes for t in told),
            "held_up_s": sorted(s for t in told for s in t.wait_seconds),
        }

    def commit(self, partition: Any, collective: Any, write: bool) -> dict[str, float]:
        from bench import simulated_ranks
        from limpet.saving.commit import (
            SaveJob,
            VersionMetadata,
            check_receipts,
            commit_collectively,
            pinned_attempt,
            put_manifest,
        )
        from limpet.saving.image import Image
        from limpet.threads import Workers

        none = Image(b"", [], [], [], [], np.zeros(1, np.int64), 0)
        about = VersionMetadata().to_node()
        draft = SaveJob(
            self.location,
            VersionMetadata(),
            None,
            collective,
            about,
            partition,
            none,
            [],
            Workers(self.pool, 2),
            0.0,
        )
        if write:
            self.receipt = simulated_ranks.write_sparse_shard(
                self.folder,
                0,
                self.ranks,
                partition.attempt,
                partition.sources,
                partition.leaf_boxes,
            )
        with pinned_attempt(self.location, partition.attempt, None, collective):
            self.wait_for_count(f"simulated/given/{self.number}")
            self.timings.pop_seconds()
            began, cpu = time.perf_counter(), time.process_time()

            def make(receipts: Any) -> Any:
                with self.timings.section("files"):
                    shards = check_receipts(self.location, receipts, self.ranks)
                manifest = draft.build_manifest(shards, 1, receipts)
                collective.begin_commit()
                with self.timings.section("put"):
                    return put_manifest(self.location, manifest, partition.plan)

            commit_collectively(self.location, partition.attempt, collective, self.receipt, make)
        seconds = {f"commit_{name}_s": took for name, took in self.timings.pop_seconds().items()}
        return {
            "commit_s": time.perf_counter() - began,
            "commit_cpu_s": time.process_time() - cpu,
            **seconds,
        }

    def leftover_keys(self) -> list[str]:
        """Return the keys in the store, except heartbeats and keys of the benchmark and torch."""
        names = self.command_store.underlying_store.list_keys()
        return [
            n for n in names if not any(of in n for of in ("/heartbeat/", "/simulated/", "init/"))
        ]

    def time_failure_detector(self) -> float:
        """Return the median seconds of one check for failed ranks, as during the write."""
        from limpet.ranks.failure_detector import FailureDetector

        vigil = FailureDetector(self.kv, "it")
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            lost = vigil.failed(range(1, self.ranks))
            if lost is not None:
                raise lost
            seconds.append(time.perf_counter() - began)
        return median(seconds)

    def file_sizes(self) -> dict[str, Any]:
        indexes = [p.stat().st_size for p in self.folder.glob("*.index.json")]
        manifest = (self.folder / "manifest.json").stat().st_size
        return {
            "manifest_bytes": manifest, "indexes": len(indexes), "indexes_bytes": sum(indexes)
        }  # fmt: skip

    def measure_load(self) -> dict[str, float]:
        """Measure the start of a load into half as many ranks, on one rank."""
        from bench.resource_usage import PeakMemory
        from bench.simulated_ranks import flatten_state
        from limpet.layout.read_plan import ReadRequest, make_read_plan
        from limpet.snapshot.reader import open_snapshot

        _, leaves = flatten_state(0, max(1, self.ranks // 2), self.shape)
        stored = open_snapshot(self.folder)
        wants = [ReadRequest(f.key, f.box) for f in leaves if f.key in stored.leaves]
        gc.collect()
        with PeakMemory() as memory:
            began, cpu = time.perf_counter(), time.process_time()
            indexes = stored.indexes()
            read = time.perf_counter()
            plan = make_read_plan(indexes, wants)
            planned, cpu = time.perf_counter(), time.process_time() - cpu
            used = memory.peak_bytes() / 2**20
        if len(wants) < 900 or not plan.items:
            raise RuntimeError("the read plan is wrong")
        return {
            "indexes_s": read - began, "read_plan_s": planned - read, "load_cpu_s": cpu,
            "load_mib": used,
        }  # fmt: skip


def measure_store_calls(calls: int = 4000) -> dict[str, float]:
    """Return the seconds of the library's store calls, and the calls per second of several clients.

    The store is on this machine. Runs in a child process.
    """
    from bench import simulated_ranks

    with ExitStack() as stack:
        port = _start_store(stack)
        store = simulated_ranks.connect(port, counted=False)
        store.set("there", b"0 " + bytes(300))

        def timed(call: Any) -> float:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - began) / calls

        found = {
            "look_s": timed(lambda: store.check(["absent"])),
            "take_s": timed(lambda: store.compare_set("there", "-", "-")),
        }
        clients = [
            stack.enter_context(
                _start_child("bench.rank0:poll_absent_key", port=port, calls=5 * calls, number=n)
            )
            for n in range(POLLING_CLIENTS)
        ]
        began = [json.loads(c.stdout.read().split("BENCH-RESULT ")[1]) for c in clients]
        took = max(b["stop"] for b in began) - min(b["start"] for b in began)
        return found | {"rate": POLLING_CLIENTS * 5 * calls / took}


def poll_absent_key(port: int, calls: int, number: int) -> dict[str, float]:
    """Poll an absent key as one of several clients; return the start and stop times.

    Runs in a child process.
    """
    from bench import simulated_ranks

    store = simulated_ranks.connect(port, counted=False)
    store.add("here", 1)
    while store.add("here", 0) < POLLING_CLIENTS:
        time.sleep(0.001)
    start = time.time()
    for _ in range(calls):
        store.check([f"absent/{number}"])
    return {"start": start, "stop": time.time()}


def _start_store(stack: ExitStack) -> int:
    """Start a process that hosts a store; return its port."""
    command = [sys.executable, "-m", "bench.rank0"]
    process = subprocess.Popen(command, stdout=-1, stdin=-1, text=True)
    stack.callback(process.kill)
    return int(process.stdout.readline())  # type: ignore[union-attr]


@contextmanager
def _start_child(function: str, **given: Any) -> Iterator[Any]:
    command = [sys.executable, "-m", "bench.fresh_process", function, json.dumps(given)]
    process = subprocess.Popen(command, stdout=-1, text=True)
    try:
        yield process
    finally:
        process.kill()


def host_store() -> None:
    """Host the store in this process, as the torchrun agent does."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=100), wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    host_store()
