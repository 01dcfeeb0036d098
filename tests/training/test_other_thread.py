"""A training in another thread than the main one handles no signals, and says so at its start."""

import subprocess
import sys

import pytest

SCRIPT = """
import signal, sys, threading, limpet
from limpet import Preemption
from limpet.preemption import SignalNotice

def train():
    state = {"progress": limpet.Progress()}
    with limpet.Checkpointer("run", state, save=limpet.EverySteps(1), OPTIONS) as ckpt:
        print("began", file=sys.stderr, flush=True)
        for step in range(2):
            ckpt.step()

WAY
"""

THREAD = "thread = threading.Thread(target=train); thread.start(); thread.join()"
AFTER_MAIN = "with limpet.Checkpointer('first', {}):\n    " + THREAD

CASES = {
    "default": (THREAD, "", "SIGTERM"),
    "explicit": (THREAD, "preemption=Preemption(grace=10)", "SIGTERM"),
    "other signal": (
        THREAD,
        "preemption=Preemption(notices=[SignalNotice(signal.SIGUSR1)])",
        "SIGUSR1",
    ),
    "off": (THREAD, "preemption=None", None),
    "no signals": (THREAD, "preemption=Preemption(notices=[])", None),
    "quiet": (THREAD, "quiet=True", None),
    "main thread": ("train()", "", None),
    "handled in the main thread": (AFTER_MAIN, "", None),
}


@pytest.mark.parametrize(("way", "options", "signal"), CASES.values(), ids=CASES)
def test_a_training_in_a_thread_says_that_it_gets_no_signal(way, options, signal, tmp_path):
    """Once, without an exception, although standard error is no terminal."""
    script = SCRIPT.replace("OPTIONS", options).replace("WAY", way)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("began\n")
    assert after == ""
    if signal is None:
        assert before == ""
    else:
        assert before.count("\n") == 1
        assert f"{signal} may end the training without a save" in before
        assert "in the main thread" in before
