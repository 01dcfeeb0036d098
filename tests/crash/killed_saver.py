"""The program that the tests kill: saves of a tiny training, without torch so that it takes 0.3 s.

``python -m tests.crash.killed_saver ROOT WORK`` prints each step after its save has returned.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import limpet
from limpet import threads
from limpet.errors import StoreError
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.saving import save  # noqa: F401  (the fork server imports it only once)
from limpet.storage.local.os_calls import Fs
from tests.trainings import initial_state, state_after, train


def save_and_sweep(root):
    """Run two saves, retention, a third save, and a sweep, all on the main thread."""
    run = Run(root)
    for step in (1, 2):
        limpet.save(f"{root}/version_{step}", state_after(step))
        print(step, flush=True)
    run.retain(KeepLast(1))
    limpet.save(f"{root}/version_3", state_after(3))
    print(3, flush=True)
    run.sweep(grace=0, now=1e12)


def resume_and_step(root):
    """Resume, train one step, save it with several background threads, and apply retention."""
    state = initial_state()
    with limpet.Checkpointer(root, state, save=EverySteps(1), keep=KeepLast(1)) as ckpt:
        ckpt.resume()
        train(state, ckpt, state["progress"].step + 1)
        ckpt.wait()
        print(state["progress"].step, flush=True)


def train_forever(root):
    """Resume, then train and save until the process is killed."""
    state = initial_state()
    with limpet.Checkpointer(root, state, save=EverySteps(1), keep=KeepLast(3)) as ckpt:
        ckpt.resume()
        while True:
            train(state, ckpt, state["progress"].step + 1)
            ckpt.wait()
            print(state["progress"].step, flush=True)


WORK = {"saves": save_and_sweep, "trains": resume_and_step, "loops": train_forever}


CHANGES = ("mkdir", "fallocate", "pwrite", "link", "rename_noreplace", "unlink", "rmdir")
"""The system calls of ``LocalStore`` after which a killed program leaves other files."""


def run_until_call(output, root, work, count, last_call=1 << 62):
    """Run as a child of a fork server, print to ``output``, and die before the ``last_call``-th
    change. A ``StoreError`` is printed, too."""
    calls = itertools.count(1)

    def kill_before(method):
        def call(*args, **options):
            if next(calls) >= last_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **options)

        return call

    for name in CHANGES:
        setattr(Fs, name, kill_before(getattr(Fs, name)))
    os.environ["LIMPET_THREADS"] = str(count)
    threads.BYTES_PER_THREAD = 1
    os.dup2(output.fileno(), sys.stdout.fileno())
    try:
        WORK[work](root)
    except StoreError:
        print("StoreError", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    WORK[sys.argv[2]](sys.argv[1])
    if "torch" in sys.modules:
        sys.exit("torch was imported")
