"""A process that has imported PyTorch and starts processes of tests by a fork.

An import of PyTorch takes about two seconds of processor time.
"""

from multiprocessing import get_context

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
