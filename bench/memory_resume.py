"""Topic 14: what the memory tier costs a training, and how fast it resumes from there."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_RANKS = 2
_STEP_SECONDS = 0.25
_EVERY = 10
_BLOCK = 20
"""Steps between two changes from training with the tier to training without it."""


def measure_training(folder: str, memory: str, size: int, blocks: int) -> dict[str, list[float]]:
    """Return the seconds of blocks of steps without and with the tier, and of the steps that
    capture. Runs in a child process."""
    import torch

    import limpet
    from bench import states

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    state, weights = states.large_state(size), torch.randn(1024, 1024)
    repeats = _calibrate(weights)
    tier = limpet.MemoryTier(every=limpet.EverySteps(_EVERY), copies=1, path=memory)
    found: dict[str, list[float]] = {"without": [], "with": [], "blocked": [], "between": []}
    with limpet.Checkpointer(
        folder, {"model": state}, save=limpet.Never(), tiers=[tier], preemption=None
    ) as ckpt:
        for block in range(2 * blocks + 2):
            has_tier, began = block % 2 == 0, time.perf_counter()
            for _ in range(_BLOCK):
                _compute(weights, repeats)
                if has_tier:
                    start = time.perf_counter()
                    ckpt.step()
                    is_capture = ckpt.current_step % _EVERY == 0
                    name = "blocked" if is_capture else "between"
                    found[name].append(time.perf_counter() - start)
            found["with" if has_tier else "without"].append(time.perf_counter() - began)
            if block == 1:  # the files of three snapshots are allocated now
                for values in found.values():
                    values.clear()
    return found


def _compute(weights: Any, repeats: int) -> None:
    product = weights
    for _ in range(repeats):
        product = product @ weights


def _calibrate(weights: Any) -> int:
    """Return how many products take the time of a step."""
    start = time.perf_counter()
    _compute(weights, 20)
    return max(1, round(20 * _STEP_SECONDS / (time.perf_counter() - start)))


def measure_resume(
    rank: int, port: int, folder: str, memory: str, size: int, phase: str
) -> NoReturn:
    """Train until the state is on disk and in memory, and end as by SIGKILL; or resume, and return
    the seconds. Runs in a child process for each rank."""
    import torch
    import torch.distributed as dist

    import limpet
    from bench import states

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, _RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    local = states.large_state(size)
    state = {
        name: limpet.Boxed(t, (rank * t.shape[0], *[0] * (t.dim() - 1)),
                             (_RANKS * t.shape[0], *t.shape[1:]))
        for name, t in local.items()
    }  # fmt: skip
    every = limpet.EverySteps(1)
    tiers = [] if phase == "disk" else [limpet.MemoryTier(every=every, copies=1, path=memory)]
    ckpt = limpet.Checkpointer(folder, {"model": state}, save=every, tiers=tiers, preemption=None)
    dist.barrier()
    start = time.perf_counter()
    snapshot = ckpt.resume()
    dist.barrier()
    seconds = time.perf_counter() - start
    if phase == "train":
        ckpt.step()
        ckpt.wait()
        ckpt._tiers.memory.wait()
        ckpt._saver.writer_lock.release()
    elif snapshot is None or (memory in snapshot.url) != (phase == "memory"):
        raise RuntimeError(f"resumed from {snapshot}")
    dist.barrier()
    if rank == 0:  # it serves the store of the job
        time.sleep(0.5)
    fresh_process.reply_and_die({"resume": [seconds]})


def _run_ranks(folder: str, memory: str, size: int, phase: str) -> float:
    """Run one phase on all ranks. Return the seconds of the slowest ``resume``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = partial(
        fresh_process.call, "bench.memory_resume:measure_resume", timeout=300,
        port=port, folder=folder, memory=memory, size=size, phase=phase,
    )  # fmt: skip
    with ThreadPoolExecutor(_RANKS) as pool:
        results = list(pool.map(lambda rank: call(rank=rank), range(_RANKS)))
    return float(max(result["resume"][0] for result in results))


def sections(options: Options) -> list[Section]:
    return [_training_section(options), _resume_section(options)]


def _training_section(options: Options) -> Section:
    size = options.medium
    title = f"Training with a snapshot of {size >> 20} MiB in memory every {_EVERY} steps"
    text = (
        f"Steps of {1000 * _STEP_SECONDS:.0f} ms of matrix products on all cores, in turn"
        f" {_BLOCK} with the memory tier and {_BLOCK} without. The slowdown counts everything:"
        " the copy in step(), and digests and deletions in the background."
    )
    memory = tempfile.mkdtemp(prefix="limpet-bench-", dir="/dev/shm")
    try:
        found = fresh_process.call(
            "bench.memory_resume:measure_training", timeout=600, folder=memory + "/run",
            memory=memory, size=size, blocks=2 if options.quick else 5,
        )  # fmt: skip
    except fresh_process.MeasurementFailed as failure:
        return Section(title, text, [], missing=[f"limpet: {failure}"])
    finally:
        shutil.rmtree(memory)
    pairs = zip(found["with"], found["without"], strict=True)
    verdicts = [
        judge("training time with / without", [a / b for a, b in pairs], most=1.02),
        judge("step() that captures", [1000 * s for s in found["blocked"]], unit="ms", digits=0),
        judge("step() in between", [1e6 * s for s in found["between"]], unit="us", digits=0),
    ]
    return Section(title, text, verdicts)


def _resume_section(options: Options) -> Section:
    size = options.medium
    title = f"resume() by {_RANKS} ranks of {size >> 20} MiB each, from memory and from a cold disk"
    text = (
        "The ranks are processes of this host. Before each resume from the disk, its files are"
        " dropped from the page cache. All bytes are checked against their digests."
    )
    place = options.folder / "resume"
    place.mkdir()
    memory = tempfile.mkdtemp(prefix="limpet-bench-", dir="/dev/shm")
    seconds: dict[str, list[float]] = {"memory": [], "disk": []}
    try:
        run = str(place / "run")
        _run_ranks(run, memory, size, "train")
        for _ in range(options.rounds + 1):
            for phase, values in seconds.items():
                if phase == "disk":
                    for path in disk.files_of(Path(run)):
                        disk.drop_page_cache(path)
                values.append(_run_ranks(run, memory, size, phase))
    except fresh_process.MeasurementFailed as failure:
        return Section(title, text, [], missing=[f"limpet: {failure}"])
    finally:
        shutil.rmtree(memory)
        disk.remove(place)
    pairs = zip(seconds["disk"], seconds["memory"], strict=True)
    verdicts = [
        judge("cold disk / memory", [a / b for a, b in pairs], least=3.0),
        judge("from memory", seconds["memory"], unit="s"),
        judge("from a cold disk", seconds["disk"], unit="s"),
        judge("GiB/s from memory", [_RANKS * size / 2**30 / median(seconds["memory"])]),
    ]
    return Section(title, text, verdicts)
