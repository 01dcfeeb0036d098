"""A process that has imported PyTorch and starts processes of tests by a fork.

An import of PyTorch takes about two seconds of processor time.
"""

import os
from multiprocessing import get_context, popen_forkserver
from threading import Lock

_poll = popen_forkserver.Popen.poll


def poll_once(process, flag=os.WNOHANG):
    """Read the exit code of a process, which can be read once. Each start of a process polls all
    processes, while another thread may wait for one."""
    with process.__dict__.setdefault("lock", Lock()):
        return _poll(process, flag)


popen_forkserver.Popen.poll = poll_once  # type: ignore[method-assign]

FORK_SERVER = get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",  # the first optimizer imports it
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "limpet.integrations.dcp",
        "tests.crash.killed_saver",
        "tests.loops.driver",
    ]
)
