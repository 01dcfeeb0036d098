"""Real processes as ranks: ``python -m tests.ranks.processes`` imports torch once, and forks a rank
for each line that it is told.

A line is JSON: where and as which rank, what to call, and what happens to the process on the way.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

import holdfast
from holdfast.engine.saving import save, write
from holdfast.storage.os_calls import Fs
from tests.ranks.faults import state_of
from tests.trainings import state_after

STAGES: dict[str, tuple[Any, str, bool]] = {
    "asked who writes what": (save, "partition_state", False),
    "told who writes what": (save, "partition_state", True),
    "before its shard": (save, "write_local_shard", False),
    "in its shard": (Fs, "pwrite", True),
    "before its index": (write, "write_index", False),
    "before its receipt": (save, "write_local_shard", True),
    "before it checks": (save, "check_receipts", False),
    "before the manifest": (save, "put_manifest", False),
    "in the manifest": (Fs, "link", False),
    "after the manifest": (save, "put_manifest", True),
    "before it lets go": (save, "release_job", False),
}
"""Where something happens: in front of a function, or right behind it."""


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # the other threads may be stopped first


def raise_disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(3)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": kill_process,
    "stop": stop_process,
    "full": raise_disk_full,
    "hold_gil": hold_gil,
}


def inject_fault(stage: str, fault: Callable[[], None]) -> None:
    """Have it happen once, at that stage."""
    owner, name, behind = STAGES[stage]
    real = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        if name == "link" and not args[-1].endswith("manifest.json"):
            return real(*args, **kwargs)
        setattr(owner, name, real)
        if not behind:
            fault()
        made = real(*args, **kwargs)
        if behind:
            fault()
        return made

    setattr(owner, name, changed)


def run_call(operation: str, url: str, rank: int, size: int, step: int) -> dict[str, Any]:
    if operation == "load":
        state = state_of(rank, size, 0)
        holdfast.load(url, state)
        whole = holdfast.load(url)
        mine, wanted = state["weights"].tensor, state_of(rank, size, step)["weights"].tensor
        assert mine.tobytes() == wanted.tobytes()
        assert whole["weights"].tobytes() == state_after(step)["weights"].tobytes()
        return {}
    state = state_of(rank, size, step)
    if operation == "save":
        return {"digest": holdfast.save(url, state, step=step).digest}
    pending = holdfast.save_async(url, state, step=step)
    state["weights"].tensor[...] = 7
    return {"digest": pending.wait().digest}


def join_process_group(spec: dict[str, Any], rank: int, size: int) -> None:
    """As a start by torchrun, whose store has still what the start before has left. Only gloo has
    its keys apart: it would now and then read the addresses of processes that are gone."""
    wait = timedelta(seconds=30)
    hosts = spec["host"] and rank == 0
    store = dist.TCPStore("127.0.0.1", spec["port"], size, hosts, wait, wait_for_workers=False)
    apart = dist.PrefixStore(f"start {spec['restart']}", store)
    dist.init_process_group("gloo", store=apart, rank=rank, world_size=size)
    whole = dist.PrefixStore("default_pg", store)
    distributed_c10d._get_default_store = lambda: whole


def run_rank(spec: dict[str, Any]) -> None:
    """The life of one rank."""
    rank, size = spec["rank"], spec["size"]
    os.environ.update(HOLDFAST_THREADS="2", **spec["env"])
    report = open(spec["report"], "a", buffering=1)  # noqa: SIM115

    def tell(**fields: Any) -> None:
        report.write(json.dumps({"at": time.time(), **fields}) + "\n")

    join_process_group(spec, rank, size)
    if spec["act"]:
        act = FAULTS[spec["act"]]

        def happen() -> None:
            tell(happened=spec["act"])
            act()

        inject_fault(spec["stage"], happen)
    for what, step in spec["calls"]:
        try:
            tell(**run_call(what, f"{spec['root']}/version_{step}", rank, size, step), step=step)
        except Exception as e:
            lost = getattr(e, "rank", "none")
            unsure = getattr(e, "outcome", "") == "unknown"
            cause = type(e.__cause__).__name__
            tell(error=type(e).__name__, rank=lost, cause=cause, unsure=unsure, text=str(e))
    tell(ended=True)
    if spec["leave"]:
        dist.destroy_process_group()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run_rank(json.loads(line))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
