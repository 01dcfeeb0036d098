"""Real processes over gloo that train with DDP or with a sharded state while one of them fails."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import limpet
from limpet.notices.notice import Notice
from limpet.training import step_savepoint
from tests.fork_server import FORK_SERVER

SIZE = 3
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Scenario:
    """What happens in a training of ``last_step`` steps. Each step takes 50 ms or more.

    In the step after ``fault_step``, ``victim`` sends itself ``fault`` after ``fault_after``
    seconds, and ``noticed`` gets a notice of ``seconds`` after one second. ``slow_step``: the
    seconds that this step takes longer. ``is_sharded``: each rank has a part of one tensor.
    ``is_pipeline``: each rank has a tensor that no other rank has. ``memory``: the folder in memory
    of all ranks, which capture each step. ``has_savepoints``: False if they would take too long, as
    with large averages of weights.
    """

    last_step: int = 12
    fault_step: int = 7
    victim: int | None = None
    fault: int = signal.SIGKILL
    fault_after: float = 0.3  # the captures and saves of all ranks have ended
    noticed: int = 0
    seconds: float = 16.0
    is_sharded: bool = False
    is_pipeline: bool = False
    slow_step: float = 0.0
    memory: str | None = None
    has_savepoints: bool = True


def _make_state(rank, scenario):
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {
        "model": model,
        "optimizer": optimizer,
        "progress": limpet.Progress(),
        "mine": limpet.PerRank({"rank": rank, "steps": 0}),
    }
    if scenario.is_sharded:
        state["shard"] = limpet.Boxed(torch.zeros(4), (4 * rank,), (4 * SIZE,))
    if scenario.is_pipeline:
        state[f"stage {rank}"] = torch.zeros(4)
    return state


def _train_step(state, rank, step, slow):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    state["optimizer"].zero_grad()
    loss = state["model"](torch.randn(4, 16, generator=generator)).square().mean()
    time.sleep(0.05 + slow)
    loss.backward()
    state["optimizer"].step()
    state["mine"].value["steps"] = step


def run_rank(rank, port, folder, scenario):
    """Train as one rank, and write what it found at the end."""
    with (folder / f"{rank}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    step_savepoint.SHARE = 1e9  # the steps are short
    if not scenario.has_savepoints:
        step_savepoint.SHARE, step_savepoint._MEASURED_SHARE = 0.0, 1e-9
    store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=TIMEOUT)
    state = _make_state(rank, scenario)
    save = limpet.EverySteps(5) | limpet.AtEnd()
    tiers = []
    if scenario.memory is not None:
        tiers.append(limpet.MemoryTier(every=limpet.EverySteps(1), path=scenario.memory))
    with limpet.Checkpointer(folder / "run", state, save=save, tiers=tiers) as ckpt:
        ckpt.resume()
        resumed = ckpt.current_step
        while ckpt.current_step < scenario.last_step:
            step = ckpt.current_step
            slow = 0.0
            if step == scenario.fault_step and resumed == 0:
                slow = scenario.slow_step
                _fail(ckpt, rank, scenario)
            _train_step(state, rank, step + 1, slow)
            ckpt.step()
    weights = state["model"].module.weight.detach().numpy().tobytes().hex()
    found = {"resumed": resumed, "weights": weights, "mine": state["mine"].value}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _fail(ckpt, rank, scenario):
    if rank == scenario.noticed:
        notice = Notice("a test", scenario.seconds)
        threading.Timer(1.0, ckpt._preemption.on_notice, [notice]).start()
    if rank == scenario.victim:
        time.sleep(scenario.fault_after)
        os.kill(os.getpid(), scenario.fault)
        time.sleep(0.5)


def start(folder, scenario):
    """Start the ranks. Return the store that they use and their processes."""
    folder.mkdir(exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    processes = [
        FORK_SERVER.Process(target=run_rank, args=(rank, store.port, folder, scenario))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    return store, processes


def wait_for(processes, seconds):
    """Wait for processes, and return their exit codes."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    return [process.exitcode for process in processes]


def kill(processes):
    for process in processes:
        process.kill()
        process.join()


def logs(folder):
    """Return the end of each rank's log, without the stacks of its threads."""
    texts = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text().splitlines()
        text = "\n".join(x for x in lines if not x.startswith(("Thread 0x", '  File "')))
        texts.append(f"--- {path.name}\n{text[-3000:]}")
    return "\n".join(texts)
