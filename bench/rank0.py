"""Rank 0 of a save by many ranks: the library's own code, over a real TCPStore, timed."""

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
CLIENTS = 4
UNCHANGED = 5
COMMITS = 3


class Spent:
    """Seconds by name; what is timed within another counts for both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    def timed(self, name: str, call: Any) -> Any:
        def do(*given: Any, **named: Any) -> Any:
            with self.on(name):
                return call(*given, **named)

        return do

    def taken(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


@contextmanager
def patched(spent: Spent) -> Iterator[None]:
    """The steps of the deal and of the commit are timed."""
    from holdfast.engine.distributed import collective as meeting
    from holdfast.engine.saving import commit, partition

    chair, assembly = partition._Chair, meeting.Assembly
    steps = [
        (chair, "hear", "plan"), (chair, "tree", "merge"), (chair, "masks", "masks"),
        (assembly, "gather", "gather"), (assembly, "scatter", "scatter"),
        (assembly, "_await", "waited"),
        (commit, "encode_manifest", "manifest"), (commit, "check_tree", "manifest"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, said in steps:
            call = spent.timed(said, getattr(owner, name))
            if owner in (chair, assembly):
                stack.enter_context(mock.patch.object(owner, name, _method(call)))
            else:
                stack.enter_context(mock.patch.object(owner, name, call))
        yield


def _method(call: Any) -> Any:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return call(self, *given, **named)

    return method


def measure(ranks: int, shape: str, folder: str) -> dict[str, Any]:
    """In a child: all figures of one number of ranks and one shape of state."""
    with ExitStack() as stack:
        port = _store(stack)
        crowd = []
        for first in range(1, min(PROCESSES, ranks - 1) + 1):
            given = {
                "port": port, "ranks": ranks, "shape": shape, "first": first, "step": PROCESSES,
                "folder": folder,
            }  # fmt: skip
            crowd.append(stack.enter_context(_child("bench.crowd:members", **given)))
        return _Rank0(port, ranks, shape, Path(folder), crowd).figures()


class _Rank0:
    def __init__(self, port: int, ranks: int, shape: str, folder: Path, others: Any) -> None:
        from bench import crowd
        from holdfast.buffers import shared_pool
        from holdfast.engine.distributed.group import Ranks
        from holdfast.engine.distributed.kv import Board, Patience
        from holdfast.engine.snapshot.location import locate

        self.ranks, self.shape, self.folder = ranks, shape, folder
        self.orders = crowd.connected(port, counted=False)
        self.store = crowd.connected(port)
        self.board = Board(self.store, 0, ranks, Patience())
        self.group = Ranks(self.board, ranks)
        self.place = locate(folder)
        self.pool = shared_pool()
        self.number = 0
        self.others = others
        self.spent = Spent()
        self.receipt: Any = None
        self.manifest_bytes = 0

    def figures(self) -> dict[str, Any]:
        from bench.crowd import state_of
        from bench.process import PeakMemory
        from holdfast.engine.state.flatten import flatten

        flatten(state_of(0, self.ranks, self.shape))  # imports are no cost of a save
        self.board.start()
        self.until("crowd/ready")
        gc.collect()
        with patched(self.spent):
            with PeakMemory() as memory:
                first = self.save(commit=True, write=True)
                peak = memory.so_far() / 2**20
            with PeakMemory() as memory:
                again = [self.save() for _ in range(UNCHANGED)]
                peak_again = memory.so_far() / 2**20
            commits = [first]
            for _ in range(COMMITS - 1):
                (self.folder / "manifest.json").unlink()
                commits.append(self.save(commit=True))
        left, vigil = self.left(), self.vigil()
        self.order("end")
        self.board.close()
        return {
            "ranks": self.ranks, "shape": self.shape, "first": first, "again": again,
            "commits": commits, "peak_mib": peak, "peak_again_mib": peak_again, "left": left,
            "vigil_s": vigil, **self.files(), **self.load(),
        }  # fmt: skip

    def order(self, what: str, commit: bool = False, write: bool = False) -> None:
        from bench.crowd import Order

        self.number += 1
        order = msgspec.json.encode(Order(what, commit, write))
        self.orders.set(f"crowd/order/{self.number}", order)

    def until(self, key: str) -> None:
        """Until all processes of the crowd have counted there."""
        while self.orders.add(key, 0) < len(self.others):
            if any(process.poll() is not None for process in self.others):
                raise RuntimeError("a process of the other ranks has failed")
            time.sleep(0.001)

    def told(self) -> list[Any]:
        from bench.crowd import Told

        self.until(f"crowd/done/{self.number}")
        raws = [
            self.orders.get(f"crowd/told/{self.number}/{i + 1}") for i in range(len(self.others))
        ]
        return [msgspec.json.decode(raw, type=Told) for raw in raws]

    def save(self, *, commit: bool = False, write: bool = False) -> dict[str, Any]:
        """One save, without its shards: seconds of the deal and of the commit, calls, bytes."""
        from bench.crowd import state_of
        from holdfast.engine.saving.partition import deal
        from holdfast.engine.state.flatten import flatten
        from holdfast.threads import uncollected

        what = f"the save of {self.place.url}"
        flat = flatten(state_of(0, self.ranks, self.shape))
        self.store.taken()
        self.spent.taken()
        self.order(what, commit, write)
        began, cpu = time.perf_counter(), time.process_time()
        meeting = self.group.meet(what)
        with meeting, uncollected():
            dealt = deal(meeting, self.group, flat, self.pool, 2)
        figures: dict[str, Any] = {
            "agree_s": time.perf_counter() - began,
            "agree_cpu_s": time.process_time() - cpu,
            **{f"{name}_s": took for name, took in self.spent.taken().items()},
        }
        if commit:
            figures |= self.commit(dealt, meeting, write)
        meeting.close()
        calls, nbytes = self.store.taken()
        told = self.told()
        return figures | {
            "calls": calls,
            "others_calls": sum(t.calls for t in told) / (self.ranks - 1),
            "nbytes": nbytes + sum(t.nbytes for t in told),
            "held_up_s": sorted(s for t in told for s in t.held_up),
        }

    def commit(self, dealt: Any, meeting: Any, write: bool) -> dict[str, float]:
        from bench import crowd
        from holdfast.engine.saving.commit import check_receipts, put_manifest, settled
        from holdfast.engine.saving.image import Image
        from holdfast.engine.saving.incremental import held
        from holdfast.engine.saving.job import Draft, Label

        none = Image(b"", [], [], [], [], np.zeros(1, np.int64))
        about = Label().node()
        draft = Draft(self.place, Label(), None, meeting, about, dealt, none, [], self.pool, 0.0)
        if write:
            self.receipt = crowd.written(
                self.folder, 0, self.ranks, dealt.attempt, dealt.leaves, dealt.holdings
            )
        with held(self.place, dealt.attempt, None, meeting):
            self.until(f"crowd/given/{self.number}")
            self.spent.taken()
            began, cpu = time.perf_counter(), time.process_time()

            def make(receipts: Any) -> Any:
                with self.spent.on("files"):
                    shards = check_receipts(self.place, receipts, self.ranks)
                manifest = draft.manifest(shards, 1)
                meeting.decide()
                with self.spent.on("put"):
                    return put_manifest(self.place, manifest, dealt.plan)

            settled(self.place, dealt.attempt, meeting, self.receipt, make)
        seconds = {f"commit_{name}_s": took for name, took in self.spent.taken().items()}
        return {
            "commit_s": time.perf_counter() - began,
            "commit_cpu_s": time.process_time() - cpu,
            **seconds,
        }

    def left(self) -> list[str]:
        """Keys in the store, but pulses and those of this benchmark and of torch."""
        names = self.orders.underlying_store.list_keys()
        return [n for n in names if not any(of in n for of in ("/pulse/", "/crowd/", "init/"))]

    def vigil(self) -> float:
        """Seconds for one look after all other ranks, as while they write: not the first one."""
        from holdfast.engine.distributed.failure_detector import Vigil

        vigil = Vigil(self.board, "it")
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            lost = vigil.lost(range(1, self.ranks))
            if lost is not None:
                raise lost
            seconds.append(time.perf_counter() - began)
        return median(seconds)

    def files(self) -> dict[str, Any]:
        indexes = [p.stat().st_size for p in self.folder.glob("*.index.json")]
        manifest = (self.folder / "manifest.json").stat().st_size
        return {
            "manifest_bytes": manifest, "indexes": len(indexes), "indexes_bytes": sum(indexes)
        }  # fmt: skip

    def load(self) -> dict[str, float]:
        """What a load into half as many ranks begins with, on one rank."""
        from bench.crowd import taken_apart
        from bench.process import PeakMemory
        from holdfast.engine.planning.read_plan import Want, plan_read
        from holdfast.engine.snapshot.snapshot import open_snapshot

        _, leaves = taken_apart(0, max(1, self.ranks // 2), self.shape)
        stored = open_snapshot(self.folder)
        wants = [Want(f.key, f.box) for f in leaves if f.key in stored.leaves]
        gc.collect()
        with PeakMemory() as memory:
            began, cpu = time.perf_counter(), time.process_time()
            indexes = stored.indexes()
            read = time.perf_counter()
            plan = plan_read(indexes, wants)
            planned, cpu = time.perf_counter(), time.process_time() - cpu
            used = memory.so_far() / 2**20
        if len(wants) < 900 or not plan.items:
            raise RuntimeError("the read plan is wrong")
        return {
            "indexes_s": read - began, "read_plan_s": planned - read, "load_cpu_s": cpu,
            "load_mib": used,
        }  # fmt: skip


def costs(calls: int = 4000) -> dict[str, float]:
    """In a child: seconds of one call to a store on this machine, as the library makes them, and
    calls a second that it answers to several clients."""
    from bench import crowd

    with ExitStack() as stack:
        port = _store(stack)
        store = crowd.connected(port, counted=False)
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
            stack.enter_context(_child("bench.rank0:hammer", port=port, calls=5 * calls, number=n))
            for n in range(CLIENTS)
        ]
        began = [json.loads(c.stdout.read().split("BENCH-RESULT ")[1]) for c in clients]
        took = max(b["stop"] for b in began) - min(b["start"] for b in began)
        return found | {"rate": CLIENTS * 5 * calls / took}


def hammer(port: int, calls: int, number: int) -> dict[str, float]:
    """In a child: one client of several that look at a key again and again."""
    from bench import crowd

    store = crowd.connected(port, counted=False)
    store.add("here", 1)
    while store.add("here", 0) < CLIENTS:
        time.sleep(0.001)
    start = time.time()
    for _ in range(calls):
        store.check([f"absent/{number}"])
    return {"start": start, "stop": time.time()}


def _store(stack: ExitStack) -> int:
    """A process that hosts a store; its port."""
    command = [sys.executable, "-m", "bench.rank0"]
    process = subprocess.Popen(command, stdout=-1, stdin=-1, text=True)
    stack.callback(process.kill)
    return int(process.stdout.readline())  # type: ignore[union-attr]


@contextmanager
def _child(function: str, **given: Any) -> Iterator[Any]:
    command = [sys.executable, "-m", "bench.child", function, json.dumps(given)]
    process = subprocess.Popen(command, stdout=-1, text=True)
    try:
        yield process
    finally:
        process.kill()


def host() -> None:
    """The process that hosts the store, as torchrun's agent does."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=100), wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    host()
