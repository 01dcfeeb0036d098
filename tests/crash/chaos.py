"""The processes of ``test_chaos.py``: a deterministic training, and every command in turn.

The fork server starts them. Each redirects its output to a file, and, unless it is killed, writes
how it ended to a result file.
"""

import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import Dataset

import limpet
from limpet.cli import cli
from limpet.errors import LimpetError
from limpet.run.policy import EverySteps, KeepBest, KeepEvery, KeepLast, OnException
from limpet.run.run import Run

REFUSED = "Another training"
"""How the error begins that refuses a second training."""


class NoisyDataset(Dataset[torch.Tensor]):
    """Samples that depend on the index and on a draw from each global generator."""

    def __len__(self):
        return 500

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), float(np.random.rand())])
        return torch.cat([torch.sin(torch.arange(14) * index), noise])


class Training:
    """A training whose every bit depends on all earlier steps and random draws."""

    def __init__(self):
        torch.set_num_threads(1)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 16))
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.progress = limpet.Progress()
        self.loader = limpet.DataLoader(NoisyDataset(), batch_size=8, shuffle=True, seed=3)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
            "loader": self.loader,
            "rng": limpet.RNG(),
            "trace": 0,
        }

    def run(self, last_step, after_step, end_epoch):
        """Train until ``last_step`` steps are done."""
        while self.progress.step < last_step:
            for batch in self.loader:
                loss = (self.model(batch) - batch).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                after_step(self.trace(loss))
                if self.progress.step == last_step:
                    return
            end_epoch()

    def trace(self, loss):
        """Add a loss to a digest of all losses, which is part of the state."""
        value = loss.item()
        self.state["trace"] = xxhash.xxh3_64_intdigest(
            f"{self.state['trace']} {value.hex()}".encode()
        )
        return value

    def fingerprint(self):
        """Return a digest of the parameters and slots, and the plain values of the state."""
        slots = self.optimizer.state_dict()["state"]
        tensors = [
            *self.model.state_dict().values(),
            *(slots[p][name] for p in sorted(slots) for name in sorted(slots[p])),
        ]
        digest = xxhash.xxh3_128_hexdigest(b"".join(t.numpy().tobytes() for t in tensors))
        return {
            "tensors": digest,
            "trace": self.state["trace"],
            "progress": self.progress.state_dict(),
            "loader": self.loader.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "next_draws": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        }


def train(root, last_step, *, every=3, at=None, pause=0.0):
    """Resume, train until ``last_step`` steps are done, and return the state's fingerprint.

    ``every`` steps, the state is saved. ``pause`` is in seconds, after each step.
    """
    training = Training()
    keep = KeepLast(3) | KeepBest(1, "loss") | KeepEvery(400)
    save = EverySteps(every) | OnException()
    with limpet.Checkpointer(root, training.state, save=save, keep=keep, incremental=4) as ckpt:
        ckpt.resume(at=at)

        def step(loss):
            ckpt.step({"loss": loss})
            time.sleep(pause)  # leave processor time to the other processes

        training.run(last_step, step, ckpt.end_epoch)
        ckpt.save()
    return training.fingerprint()


def train_until_killed(root, at):
    train(root, 1 << 40, at=at, pause=0.005)


def run_command(arguments):
    """Run one command of the command line in this process."""
    cli.main(args=arguments, prog_name="limpet")


def add_metrics(root, value):
    """Add a metric to the newest version through the API."""
    run = Run(root)
    newest = run.latest()
    if newest is not None:
        run.add_metrics(newest, {"extra": value})


def run_and_report(folder, name, work, *arguments):
    """Run ``work`` in a process of its own; write its output and how it ended into ``folder``."""
    result = Path(folder) / f"{name}.result"
    with open(Path(folder) / f"{name}.output", "wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        work(*arguments)
        outcome = "exit 0"
    except SystemExit as e:
        outcome = f"exit {e.code or 0}"
    except LimpetError as e:
        outcome = f"refused {e}"
    except BaseException:
        traceback.print_exc()
        outcome = "traceback"
    sys.stdout.flush()
    sys.stderr.flush()
    partial = result.with_suffix(".partial")
    partial.write_text(outcome)
    partial.rename(result)
