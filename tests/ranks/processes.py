"""Real processes as ranks.

``python -m tests.ranks.processes`` imports torch once and forks a rank for each line of its
standard input. A line is a JSON object that describes the rank, its calls, and the fault to inject.
"""

import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

import limpet
from limpet import threads
from limpet.loading.snapshot import reader_of
from limpet.saving import save, write
from limpet.saving.commit import SaveJob
from limpet.storage.local.os_calls import Fs
from tests.ranks.faults import state_of
from tests.trainings import state_after

STAGES: dict[str, tuple[Any, str, bool]] = {
    "before the partition": (save, "partition_state", False),
    "after the partition": (save, "partition_state", True),
    "before the shard": (save, "write_local_shard", False),
    "in the shard": (Fs, "pwrite", True),
    "before the index": (write, "write_index", False),
    "before the receipt": (save, "write_local_shard", True),
    "before the check": (save, "check_receipts", False),
    "before the manifest": (save, "put_manifest", False),
    "in the manifest": (Fs, "link", False),
    "after the manifest": (save, "put_manifest", True),
    "before the release": (SaveJob, "__exit__", False),
}
"""The stages of a save: the owner and the name of a function, and if the stage follows its call."""


def kill_process():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_process():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # the other threads may stop first


def raise_disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hold_gil():
    ctypes.PyDLL(None).sleep(3)


def make_late():
    time.sleep(3)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": kill_process,
    "stop": stop_process,
    "full": raise_disk_full,
    "hold_gil": hold_gil,
    "late": make_late,
}


def inject_fault(stage, fault):
    """Make ``fault`` occur once, at a stage of ``STAGES``."""
    owner, name, after = STAGES[stage]
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        if name == "link" and not args[-1].endswith("manifest.json"):
            return original(*args, **kwargs)
        setattr(owner, name, original)
        if not after:
            fault()
        result = original(*args, **kwargs)
        if after:
            fault()
        return result

    setattr(owner, name, replacement)


def run_call(operation, url, rank, size, step):
    if operation == "load":
        state = state_of(rank, size, 0)
        limpet.load(url, state)
        whole = limpet.load(url)
        loaded, expected = state["weights"].tensor, state_of(rank, size, step)["weights"].tensor
        assert loaded.tobytes() == expected.tobytes()
        assert whole["weights"].tobytes() == state_after(step)["weights"].tobytes()
        return {}
    state = state_of(rank, size, step)
    if operation == "save":
        return {"digest": reader_of(limpet.save(url, state, step=step)).digest}
    pending = limpet.save_async(url, state, step=step)
    state["weights"].tensor[...] = 7
    return {"digest": reader_of(pending.wait()).digest}


def join_process_group(spec, rank, size):
    """Join a process group as after a restart by torchrun. Return the store.

    The store still holds the keys of the previous start. Only gloo gets a new prefix, because it
    would sometimes read the addresses of processes that have ended.
    """
    timeout = timedelta(seconds=30)
    is_host = spec["host"] and rank == 0
    store = dist.TCPStore("127.0.0.1", spec["port"], size, is_host, timeout, wait_for_workers=False)
    gloo_store = dist.PrefixStore(f"start {spec['restart']}", store)
    dist.init_process_group("gloo", store=gloo_store, rank=rank, world_size=size)
    default_store = dist.PrefixStore("default_pg", store)
    distributed_c10d._get_default_store = lambda: default_store
    return store


def run_rank(spec):
    """Run one rank and write its reports, one JSON object per line."""
    rank, size = spec["rank"], spec["size"]
    os.environ.update(LIMPET_THREADS="2", **spec["env"])
    threads.BYTES_PER_THREAD = 1
    report_file = open(spec["report"], "a", buffering=1)  # noqa: SIM115

    def report(**fields):
        report_file.write(json.dumps({"at": time.time(), **fields}) + "\n")

    store = join_process_group(spec, rank, size)
    if spec["fault"]:
        fault = FAULTS[spec["fault"]]

        def report_and_fail():
            report(injected=spec["fault"])
            fault()

        inject_fault(spec["stage"], report_and_fail)
    for operation, step in spec["calls"]:
        url = f"{spec['root']}/version_{step}"
        try:
            report(**run_call(operation, url, rank, size, step), step=step)
        except Exception as e:
            failed_rank = getattr(e, "rank", "none")
            uncertain = getattr(e, "outcome", "") == "unknown"
            cause = type(e.__cause__).__name__
            report(
                error=type(e).__name__,
                rank=failed_rank,
                cause=cause,
                uncertain=uncertain,
                text=str(e),
            )
    report(ended=True)
    if spec["host"]:
        wait_for_ends(store, rank, size)
    if spec["destroy_group"]:
        dist.destroy_process_group()


def wait_for_ends(store, rank, size):
    """Keep rank 0, which hosts the store, for up to 30 s, until the other ranks have ended."""
    with suppress(dist.DistError):  # rank 0 was killed
        ended = store.add("ended", 1)
        end = time.monotonic() + 30
        while rank == 0 and ended < size and time.monotonic() < end:
            time.sleep(0.02)
            ended = store.add("ended", 0)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the ranks
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
