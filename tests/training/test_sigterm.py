"""SIGTERM to a training of PyTorch in a real process, and a restart that goes on exactly."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.run.run import Run

SCRIPT = """
import sys, time
import torch, holdfast

torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
progress = holdfast.Progress()
state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": holdfast.RNG()}
with holdfast.Checkpointer(sys.argv[1], state) as ckpt:
    ckpt.resume()
    while progress.step < 12:
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "stop" in sys.argv and progress.step == 6:  # the optimizer has stepped
            print("in a step", flush=True)
            while ckpt._preemption._deadline is None:
                time.sleep(0.01)
            time.sleep(0.2)
        ckpt.step()
print(progress.step, model.weight.tolist(), torch.rand(1).item(), flush=True)
"""


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(folder), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_sigterm_in_a_step_saves_that_step_and_the_restart_is_exact(tmp_path: Path) -> None:
    with (
        start(tmp_path / "undisturbed") as undisturbed,
        start(tmp_path / "run", "stop") as training,
    ):
        assert training.stdout is not None
        assert training.stdout.readline() == "in a step\n"
        training.send_signal(signal.SIGTERM)
        assert training.wait(60) == 75
        expected = undisturbed.communicate(timeout=60)[0]
        assert undisturbed.returncode == 0
    assert [(s.step, s.metadata["reason"]) for s in Run(tmp_path / "run").snapshots()] == [
        (7, "preemption")
    ]
    with start(tmp_path / "run") as restarted:
        assert restarted.communicate(timeout=60)[0] == expected
        assert restarted.returncode == 0
