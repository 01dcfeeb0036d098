"""One rank of the training: parameters sharded by FSDP2, states in memory, rare saves, which go to
local disks first.

Each rank writes a trace into the folder of its start: what happened when, and the samples of every
step before the step counts as complete.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import limpet
from limpet.errors import Preempted
from limpet.notices.notice import NoticeSource
from limpet.notices.platform import detect_sources
from limpet.notices.signals import SignalNotice
from limpet.run.policy import EverySteps, KeepLast
from tests.chaos import clouds

BATCH = 12
"""Samples in a step, over all ranks: a multiple of 2, 3, and 4."""

SAMPLES = 600
JOIN_SECONDS = 60.0
SAVE_EVERY = 40
CAPTURE_EVERY = 5


@dataclass(frozen=True)
class Start:
    """One start of the training. ``memory``, ``disks``, and ``metadata``: the folder in memory, the
    one on the local disk, and the URLs of the metadata servers of each rank's host. No ``memory``:
    without tiers.

    ``pause``: seconds that a step takes in addition, as if it waited for a device. ``save_every``:
    the steps from one save to the next. ``dropout``: draws from the random generators,
    which differ between ranks. ``has_launcher_store``: the launcher hosts the job's store.
    """

    folder: str
    run: str
    size: int
    last_step: int
    dropout: float
    memory: Sequence[str] = ()
    disks: Sequence[str] = ()
    metadata: Sequence[dict[str, str]] = ()
    pause: float = 0.0
    save_every: int = SAVE_EVERY
    has_launcher_store: bool = False

    @property
    def port_file(self):
        """The file with the port of the job's store."""
        return Path(self.folder, "port")

    def host_store(self):
        """Host the job's store in this process, at a port of its own."""
        timeout = timedelta(seconds=JOIN_SECONDS)
        store = dist.TCPStore(
            "127.0.0.1", 0, self.size, is_master=True, timeout=timeout, wait_for_workers=False
        )
        partial = self.port_file.with_suffix(".partial")
        partial.write_text(str(store.port))
        partial.rename(self.port_file)
        return store


class Waves(Dataset[tuple[int, torch.Tensor]]):
    """Samples that their index determines, with that index."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, torch.sin(torch.arange(16, dtype=torch.float64) * (index + 1))


class Trace:
    """What one rank writes down: ``log`` for what happens, ``steps`` for the samples.

    Each entry is one ``write``, so a kill leaves only whole entries.
    """

    def __init__(self, folder, rank, samples):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._log = os.open(f"{folder}/rank-{rank}.log", flags)
        self._steps = os.open(f"{folder}/rank-{rank}.steps", flags)
        self._samples = samples

    def log(self, name, **fields):
        fields = {k: v if isinstance(v, int | float | str | None) else repr(v)[:500]
                  for k, v in fields.items()}  # fmt: skip
        entry = {**fields, "name": name, "at": time.monotonic()}
        os.write(self._log, f"{json.dumps(entry)}\n".encode())

    def sink(self, name, fields):
        """Write down an event of Limpet."""
        self.log(f"event {name}", **{k: v for k, v in fields.items() if k not in ("name", "at")})

    def step(self, step, indices):
        values = torch.tensor([step, time.monotonic_ns(), *indices.tolist()], dtype=torch.int64)
        assert len(values) == 2 + self._samples
        os.write(self._steps, values.numpy().tobytes())


def join(start, rank):
    """Join the process group, through the store of this start."""
    if rank == 0 and not start.has_launcher_store:
        store = start.host_store()
    else:
        end = time.monotonic() + JOIN_SECONDS
        while not start.port_file.exists():
            if time.monotonic() > end:
                raise TimeoutError("the port of the store has not been published")
            time.sleep(0.005)
        timeout = timedelta(seconds=JOIN_SECONDS)
        port = int(start.port_file.read_text())
        store = dist.TCPStore("127.0.0.1", port, start.size, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=start.size, timeout=timedelta(seconds=120)
    )
    dist.barrier()


def make_model(size, dropout):
    """Return a model in float64, so that the order of additions hardly matters."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, 16),
    ).double()  # fmt: skip
    return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


def train(start, rank, trace):
    model = make_model(start.size, start.dropout)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = limpet.Progress()
    loader = limpet.DataLoader(
        Waves(), total_batch_size=BATCH, shuffle=True, drop_last=True, seed=3
    )
    state = {
        "model": model,
        "optimizer": optimizer,
        "progress": progress,
        "loader": loader,
        "rng": limpet.RNG(),
    }
    tiers: list[limpet.MemoryTier | limpet.LocalTier] = []
    if start.memory:
        memory = limpet.MemoryTier(every=EverySteps(CAPTURE_EVERY), path=start.memory[rank])
        tiers = [memory, limpet.LocalTier(start.disks[rank])]
    notices: list[NoticeSource] = [SignalNotice(), *detect_sources()]
    if start.metadata and os.environ["LOCAL_RANK"] == "0":
        account = Path(start.folder, f"account-{rank}")
        notices += clouds.other_sources(start.metadata[rank], account)
    save, preemption = EverySteps(start.save_every), limpet.Preemption(notices=notices)
    with limpet.Checkpointer(
        start.run, state, save=save, keep=KeepLast(3), tiers=tiers, preemption=preemption
    ) as ckpt:
        trace.log("resuming")
        snapshot = ckpt.resume()
        url = None if snapshot is None else snapshot.url
        trace.log("restored", step=ckpt.current_step, url=url)
        while progress.step < start.last_step:
            for indices, batch in loader:
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                trace.step(progress.step + 1, indices)
                ckpt.step()
                time.sleep(start.pause)
                if progress.step >= start.last_step:
                    break
            else:
                ckpt.end_epoch()
        ckpt.save()


def run_rank(start, rank):
    """Be one rank, in a process of its own, and exit with the code of the exit contract."""
    output = os.open(f"{start.folder}/rank-{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)
    sys.stderr.reconfigure(line_buffering=True)
    trace = Trace(start.folder, rank, BATCH // start.size)
    trace.log("started")
    local = [r for r in range(start.size) if not start.memory or start.memory[r] ==
             start.memory[rank]].index(rank)  # fmt: skip
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(start.size), LOCAL_RANK=str(local), GLOO_SOCKET_IFNAME="lo",
        LIMPET_THREADS="2",
    )  # fmt: skip
    if start.metadata:
        os.environ.update(clouds.variables(start.metadata[rank]))
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.enter_context(limpet.attach(trace.sink))
        try:
            join(start, rank)
            trace.log("joined")
            train(start, rank, trace)
        except Preempted as e:
            trace.log("left", code=e.code, step=e.step, saved=e.saved_step)
            raise
        except BaseException as e:
            trace.log("raised", error=e)
            traceback.print_exc()
            raise SystemExit(1) from e
    trace.log("complete")
