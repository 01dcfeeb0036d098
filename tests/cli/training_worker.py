"""A real training that does what an action says. Usage: RUN READY ACTION

It makes three steps, writes its process id to ``READY.RANK``, and then:

- ``train``: makes steps until it must leave;
- ``request``: the same, and saves after SIGUSR1;
- ``long``: makes a step that takes a minute;
- ``done``: ends at once.

All others wait for a notice:

- ``fail``: raises an error, which is caught outside the training: it exits with 1;
- ``raise``: raises an error that nobody catches;
- ``exit``: exits with 3 in the ``with`` block;
- ``exit-0``: exits with 0 there;
- ``lost``: raises ``RankFailed``, as if another rank had ended first;
- ``end``: ends normally;
- ``exit-later``: ends normally, and then exits with 3.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import limpet
from limpet import Preemption
from limpet.notices.signals import SignalNotice

run, ready, action = sys.argv[1:]
rank, group = int(os.environ.get("RANK", "0")), None
if "RANK" in os.environ:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if action == "apart":  # each rank is rank 0 of a group of its own
        run, action = f"{run}-{rank}", "train"
        groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
        group = groups[rank]
state = {"weights": np.zeros(4), "progress": limpet.Progress()}
notices = [SignalNotice(), SignalNotice(signal.SIGUSR1, stops=False)]
preemption = Preemption(notices=notices if action == "request" else None)
save = limpet.EverySteps(10**6)
ckpt = limpet.Checkpointer(run, state, save=save, group=group, preemption=preemption)


def train():
    ckpt.resume()
    for _ in range(3):
        if action == "long":  # no savepoint follows a step that is not much longer than a copy
            time.sleep(0.2)
        ckpt.step()
    Path(f"{ready}.tmp{rank}").write_text(f"{os.getpid()}\n")
    Path(f"{ready}.tmp{rank}").rename(f"{ready}.{rank}")
    if action in ("train", "request"):
        while True:
            time.sleep(0.01)
            ckpt.step()
    if action == "long":
        time.sleep(60)
        ckpt.step()
    while action != "done" and not ckpt._preemption.is_pending:
        time.sleep(0.01)
    if action in ("fail", "raise"):
        raise ValueError("the loss is NaN")
    if action == "lost":
        raise limpet.errors.RankFailed("Rank 1 has ended")
    if action in ("exit", "exit-0"):
        sys.exit(3 if action == "exit" else 0)


try:
    with ckpt:
        train()
except ValueError as e:
    if action == "raise":
        raise
    print("failed:", e, file=sys.stderr)
    sys.exit(1)
if action == "exit-later":
    sys.exit(3)
