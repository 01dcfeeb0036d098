"""Forks of a process that has imported PyTorch, and the leaves of the states that they save."""

import os
import signal
import sys
import threading
import time
import traceback

import torch

import limpet


def fork(work):
    """Run ``work()`` in a fork, and return its process id. It exits with 1 after an error."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def wait(pid, end):
    """Return the exit code of a process, or minus the signal that ended it."""
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "no end"


def send_sigterm(ckpt):
    """Send SIGTERM to this process, and wait until the training of ``ckpt`` must leave at its next
    step: it could make its last steps before that, and end with 0."""
    seen = threading.Event()
    with limpet.attach(lambda name, fields: seen.set() if name == "notice" else None):
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(60)
    with ckpt._preemption._watcher._lock:  # held during the response, which begins with the event
        pass


def describe(value, key):
    """Yield every leaf of a state, by its key, as text or bytes."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, member in items:
            yield from describe(member, f"{key}/{name}")
    elif isinstance(value, torch.Tensor):
        yield key, (value.dtype, value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif not key.endswith("/passes"):  # a loop may begin fewer passes in the rest of an epoch
        yield key, repr(value)
