"""SIGTERM and SIGHUP to a training of PyTorch in a real process, and a restart that goes on
exactly."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from limpet.run.run import Run

SCRIPT = """
import sys, time
import torch, limpet

torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
progress = limpet.Progress()
state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": limpet.RNG()}
with limpet.Checkpointer(sys.argv[1], state) as ckpt:
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
        if "ignore" in sys.argv and progress.step == 6:
            print("in a step", flush=True)
            sys.stdin.readline()
        ckpt.step()
print(progress.step, model.weight.tolist(), torch.rand(1).item(), flush=True)
"""


def start(folder, *args, before=()):
    command = [*before, sys.executable, "-W", "error", "-c", SCRIPT, str(folder), *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def saved_steps(run):
    return [(s.step, s.metadata["reason"]) for s in Run(run).snapshots()]


@pytest.mark.slow
def test_the_end_of_the_terminal_saves_the_step(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), "stop"]
        os.execv(sys.executable, command)
    printed = b""
    while b"in a step\r\n" not in printed:  # the end of the line may come later
        printed += os.read(terminal, 4096)
    os.close(terminal)  # as when a window or a connection is closed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert saved_steps(tmp_path) == [(7, "preemption")]


@pytest.mark.slow
def test_sighup_under_nohup_stays_ignored(tmp_path):
    with start(tmp_path, "ignore", before=["nohup"]) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "in a step\n"
        training.send_signal(signal.SIGHUP)
        training.communicate("\n", timeout=60)
        assert training.returncode == 0
    assert saved_steps(tmp_path) == [(12, "end")]


@pytest.mark.slow
def test_a_signal_in_a_step_saves_that_step_and_the_restart_is_exact(tmp_path):
    """BEHAVIOURS.md, A1, A7, and A10."""
    with (
        start(tmp_path / "undisturbed") as undisturbed,
        start(tmp_path / "run", "stop") as training,
    ):
        assert training.stdout is not None
        assert training.stdout.readline() == "in a step\n"
        training.send_signal(signal.SIGTERM)
        errors = training.communicate(timeout=60)[1]
        assert training.returncode == 75
        assert errors.splitlines() == [
            f"limpet: started a new training in {tmp_path}/run: it has no version yet",
            "limpet: stopped after step 7, which is saved, because of SIGTERM",
        ]
        expected = undisturbed.communicate(timeout=60)[0]
        assert undisturbed.returncode == 0
    assert saved_steps(tmp_path / "run") == [(7, "preemption")]
    with start(tmp_path / "run") as restarted:
        assert restarted.communicate(timeout=60)[0] == expected
        assert restarted.returncode == 0


WITH_WORKERS = """
import sys
import torch, limpet

torch.manual_seed(3)
model = torch.nn.Linear(1, 1)
loader = limpet.DataLoader(torch.ones(4000, 1), batch_size=4, num_workers=2)
with limpet.Checkpointer(sys.argv[1], {"model": model, "loader": loader}) as ckpt:
    for _ in ckpt.epochs(1):
        for number, batch in enumerate(loader):
            ckpt.step()
            if number == 5:
                print("in a step", flush=True)
                sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_job_does_not_end_the_workers_of_the_loader(tmp_path):
    command, pipe = [sys.executable, "-c", WITH_WORKERS, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "in a step\n"
        os.killpg(training.pid, signal.SIGTERM)
        training.communicate("\n", timeout=60)
    assert training.returncode == 75
    [(_, reason)] = saved_steps(tmp_path)
    assert reason == "preemption"
