"""The example for SIGTERM in docs/retention.md works in a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.run.run import Run

SCRIPT = """
import os, signal, sys, time
import torch, holdfast

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
progress = holdfast.Progress()
state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": holdfast.RNG()}
save = holdfast.EverySteps(4) | holdfast.OnException()
with holdfast.Checkpointer(sys.argv[1], state, save=save) as ckpt:
    ckpt.resume()
    while True:
        loss = model(torch.randn(8, 4)).square().mean()
        if progress.step == 6:
            print("at", loss.item(), flush=True)
            while True:
                time.sleep(0.01)  # a signal right before a sleep does not end it
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step()
"""


@pytest.mark.slow
def test_sigterm_saves_the_previous_step_and_ends_the_training(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stdout.readline().startswith("at ")
        training.send_signal(signal.SIGTERM)
        assert training.wait(60) == 143
    assert [(s.step, s.metadata["reason"]) for s in Run(tmp_path / "run").snapshots()] == [
        (4, "cadence"),
        (6, "exception"),
    ]
