"""A training that dies at step 25, on its last rank. Usage: RUN [always|from-20]

It saves every 10 steps and is complete after 30. With ``from-20``, it dies only if it resumed from
step 20. It works with and without torchrun.
"""

import os
import sys

import numpy as np

import limpet

run, dies = sys.argv[1:]
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    import torch.distributed as dist

    dist.init_process_group("gloo")

state = {"weights": np.zeros(4), "progress": limpet.Progress()}
save = limpet.EverySteps(10) | limpet.AtEnd()
with limpet.Checkpointer(run, state, save=save) as ckpt:
    ckpt.resume()
    print(f"rank {rank} began at step {ckpt.current_step}", flush=True)
    began = ckpt.current_step
    while ckpt.current_step < 30:
        if size > 1:
            dist.barrier()
        if ckpt.current_step == 25 and rank == size - 1 and (dies == "always" or began == 20):
            ckpt._saver.wait()  # not ``wait``, for which all ranks are needed
            raise ValueError("it dies here")
        state["weights"] += 1
        ckpt.step()
