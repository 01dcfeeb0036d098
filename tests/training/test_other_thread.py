"""A training in another thread than the main one handles no signals, and says so at its start."""

import subprocess
import sys

SCRIPT = """
import signal, sys, threading, limpet
from limpet import Preemption
from limpet.preemption import SignalNotice

def train(name, options):
    state = {"progress": limpet.Progress()}
    with limpet.Checkpointer(f"run {name}", state, save=limpet.EverySteps(1), **options) as ckpt:
        print("began", file=sys.stderr, flush=True)
        for step in range(2):
            ckpt.step()

def train_in_thread(*arguments):
    print(f"== {arguments[0]}", file=sys.stderr, flush=True)
    thread = threading.Thread(target=train, args=arguments)
    thread.start()
    thread.join()

train_in_thread("default", {})
train_in_thread("explicit", {"preemption": Preemption(grace=10)})
other = Preemption(notices=[SignalNotice(signal.SIGUSR1)])
train_in_thread("other signal", {"preemption": other})
train_in_thread("off", {"preemption": None})
train_in_thread("no signals", {"preemption": Preemption(notices=[])})
train_in_thread("quiet", {"quiet": True})
with limpet.Checkpointer("first", {}):
    train_in_thread("handled in the main thread", {})
print("== main thread", file=sys.stderr, flush=True)
train("main thread", {})
"""

SIGNALS = {"default": "SIGTERM", "explicit": "SIGTERM", "other signal": "SIGUSR1"}


def test_a_training_in_a_thread_says_that_it_gets_no_signal(tmp_path):
    """Once, without an exception, although standard error is no terminal."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    trainings = done.stderr.split("== ")[1:]
    assert len(trainings) == 8
    for text in trainings:
        name, _, lines = text.partition("\n")
        before, _, after = lines.partition("began\n")
        assert ("saved step" not in after) if name == "quiet" else ("saved step" in after)
        assert after.count("\n") == (name != "quiet")
        if name in SIGNALS:
            assert before.count("\n") == 1
            assert f"{SIGNALS[name]} may end the training without a save" in before
            assert "in the main thread" in before
        else:
            assert before == "", name
