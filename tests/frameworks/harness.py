"""Runs the training of a framework undisturbed, and killed and resumed, and compares the results.

A training is a function of a module, ``function(run)``: what a script does, from the import of the
model to the end of the training. Its processes are forks of one that has imported the framework.
"""

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

import limpet
from tests.fork_server import FORK_SERVER
from tests.forks import describe, fork, send_sigterm, wait

LIMIT = 120.0
"""Seconds for one process."""


class Kill(NamedTuple):
    """How a process ends, once ``ckpt.step`` has counted ``step``, or once the training calls
    ``reach(mark)``. ``waits``: after the save in flight. ``damage``: then a bit of a file of the
    newest version flips ("flip"), or the file loses its second half ("truncate")."""

    step: int = 0
    mark: str = ""
    signal: int = signal.SIGKILL
    waits: bool = True
    damage: str = ""


_kill: Kill | None = None
_other_ranks: list[int] = []  # their processes, in the last rank, which is the one that is killed


def reach(mark: str) -> None:
    """Called by trainings, at a point where they may be killed."""
    if _kill is not None and _kill.mark == mark:
        _end()


def _end():
    global _kill
    kill, _kill = _kill, None  # a mark may be reached again before the training leaves
    if kill.waits:
        for checkpointer in _checkpointers:
            checkpointer._saver.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    if kill.signal == signal.SIGTERM:
        send_sigterm(_checkpointers[-1])
        return
    for pid in _other_ranks:  # before they notice that this rank is gone
        os.kill(pid, kill.signal)
    os.kill(os.getpid(), kill.signal)


_checkpointers: list = []
_original_step = limpet.Checkpointer.step


def _step(self, *args, **kwargs):
    if self not in _checkpointers:
        _checkpointers.append(self)
    _original_step(self, *args, **kwargs)
    if _kill is not None and _kill.step == self.current_step:
        _end()


def training(module, name):
    """Return a stand-in for a function of a module that only a ``Process`` imports."""
    return SimpleNamespace(__module__=module, __qualname__=name)


class Process:
    """A process that has imported ``modules``, and forks the trainings."""

    def __init__(self, *modules):
        self._pipe, end = multiprocessing.Pipe()
        self._process = FORK_SERVER.Process(target=_serve, args=(end, modules), daemon=False)
        self._process.start()
        end.close()

    def close(self):
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    def run(self, function, run, *, kill=None, ranks=1, **arguments):
        """Run ``function(run, **arguments)`` in a fork, or in one per rank, with the environment
        that torchrun gives. Return what it has printed. Raises ``AssertionError`` if it does not
        end as ``kill`` says."""
        name = (function.__module__, function.__qualname__)
        output = Path(f"{run}.output")
        self._pipe.send((name, str(run), arguments, kill, ranks, str(output)))
        assert self._pipe.poll(LIMIT + 30), "no answer"
        codes = self._pipe.recv()
        expected = 0
        if kill is not None:
            expected = 75 if kill.signal == signal.SIGTERM else -kill.signal
        text = output.read_text()
        assert codes == [expected] * ranks, f"{name[1]}, {kill}: ended with {codes}\n{text[-6000:]}"
        return text

    def check_exact(self, function, folder, *, kills, ranks=1, ignore=(), **arguments):
        """Compare a training that is killed several times with one that is not: every leaf of the
        last versions, and the metrics of all versions of one step. ``ignore``: parts of the keys of
        leaves that differ, such as times. Return the two runs."""
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        self.run(function, whole, ranks=ranks, **arguments)
        for kill in kills:
            self.run(function, killed, kill=kill, ranks=ranks, **arguments)
            if kill.damage:
                damage(killed, kill.damage)
        self.run(function, killed, ranks=ranks, **arguments)
        compare(whole, killed, ignore)
        return limpet.Run(str(whole)), limpet.Run(str(killed))


def damage(run, how):
    """Damage the largest file of the newest version."""
    files = [p for p in Path(limpet.Run(str(run)).latest().url).rglob("*") if p.is_file()]
    path = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    if how == "truncate":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 4
    path.write_bytes(content)


def compare(whole, killed, ignore=()):
    """Compare two runs."""
    first, second = (dict(describe(limpet.load(f"{run}@latest"), "")) for run in (whole, killed))
    keys = [k for k in first | second if not any(part in k for part in ignore)]
    differing = {k: (first.get(k), second.get(k)) for k in keys if first.get(k) != second.get(k)}
    assert not differing, f"{len(differing)} of {len(keys)} leaves differ: {differing}"[:3000]
    assert len(keys) > 4
    a, b = (limpet.Run(str(run)) for run in (whole, killed))
    steps = [{s.step for s in run.snapshots()} for run in (a, b)]
    assert max(steps[0]) == max(steps[1])
    metrics = [{step: run.metrics(step) for step in steps[0] & steps[1]} for run in (a, b)]
    assert metrics[0] == metrics[1], f"metrics differ: {metrics}"


# -- in the process that has imported the framework --------------------------------------------


def _serve(pipe, modules):
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    warnings.simplefilter("ignore")
    for name in modules:
        import_module(name)
    for name in limpet.__all__:
        getattr(limpet, name)
    limpet.Checkpointer.step = _step
    gc.collect()
    gc.freeze()  # a search for garbage would read, and so copy, all pages
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(*request))


def _run(name, run, arguments, kill, ranks, output):
    end = time.monotonic() + LIMIT
    Path(output).unlink(missing_ok=True)
    # as with torchrun, no rank serves it: one could end while another still reads
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    _other_ranks.clear()
    for rank in range(ranks):
        train = partial(_train, name, run, arguments, kill, (rank, ranks), store.port, output)
        _other_ranks.append(fork(train))
    return [wait(pid, end) for pid in _other_ranks]


def _train(name, run, arguments, kill, place, port, output):
    global _kill
    out = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    rank, ranks = place
    _kill = kill if rank == ranks - 1 else None
    if ranks > 1:
        here, everywhere = str(rank), str(ranks)
        os.environ |= {
            "RANK": here, "LOCAL_RANK": here, "WORLD_SIZE": everywhere,
            "LOCAL_WORLD_SIZE": everywhere, "GROUP_RANK": "0", "NODE_RANK": "0",
            "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    seed = 5 if not Path(run).exists() else random.SystemRandom().getrandbits(32)
    random.seed(seed)  # a resume depends on nothing that a script draws before it
    np.random.seed(seed)
    torch.manual_seed(seed)
    getattr(import_module(name[0]), name[1])(run, **arguments)
