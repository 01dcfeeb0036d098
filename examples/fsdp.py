"""Train the model of ``train.py`` with FSDP2, and resume with any other number of ranks.

    torchrun --nproc-per-node 4 examples/fsdp.py runs/fsdp
    torchrun --nproc-per-node 3 examples/fsdp.py runs/fsdp    # resumes

Parameters and optimizer state are sharded over the ranks. Each rank saves its shards, and after a
restart each rank reads the parts of the snapshot that it needs. The sequence of batches does not
change, because ``total_batch_size`` is that of all ranks together.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import Subset
from train import Model, Windows, read_text

import limpet

HELD_OUT = 64
"""The number of windows that are only used for evaluation."""


class Loss(nn.Module):
    """The cross-entropy loss of a model on a batch of windows."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_sharded_model(options: argparse.Namespace) -> Loss:
    """Return the loss module with the model, with parameters sharded over all ranks."""
    torch.manual_seed(0)  # the same initial parameters for any number of ranks
    # no dropout: each rank draws its own masks, so the loss would depend on the number of ranks
    model = Model(options.width, options.layers, options.length, dropout=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(Loss(model), mesh=mesh)


def evaluate(loss_module: Loss, windows: torch.Tensor) -> float:
    """Return the loss on windows that are not used for training, the same on all ranks."""
    loss_module.eval()
    with torch.no_grad():
        loss = loss_module(windows)
    loss_module.train()
    return loss.item()


def train(options: argparse.Namespace) -> None:
    loss_module = make_sharded_model(options)
    optimizer = torch.optim.AdamW(loss_module.parameters(), lr=3e-3)
    windows = Windows(read_text(), options.length)
    held_out = torch.stack([windows[-i] for i in range(1, HELD_OUT + 1)])
    loader = limpet.DataLoader(
        Subset(windows, range(options.windows)),
        total_batch_size=options.batch,
        shuffle=True,
        drop_last=True,
    )
    # the same keys as in train.py
    state = {"model": loss_module.model, "optimizer": optimizer, "loader": loader}
    is_coordinator = dist.get_rank() == 0
    save = limpet.EverySteps(options.every)
    with limpet.Checkpointer(options.run, state, save=save, keep=limpet.KeepLast(2)) as ckpt:
        snapshot = ckpt.resume()
        if is_coordinator:
            start = f"resuming from step {snapshot.step}" if snapshot else "starting from scratch"
            world_size = dist.get_world_size()
            print(f"{start} on {world_size} rank{'s' if world_size > 1 else ''}", flush=True)
        for epoch in ckpt.epochs(options.epochs):  # those that remain
            for batch in loader:  # after a resume, the rest of the epoch
                loss = loss_module(batch)
                optimizer.zero_grad()
                loss.backward()  # averages gradients over the ranks
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                if is_coordinator:  # before the save: no version is ahead of the log
                    print(f"step {ckpt.current_step + 1:4}  loss {mean.item():.9f}", flush=True)
                ckpt.step({"loss": mean})  # counts the step, and saves when due
            score = evaluate(loss_module, held_out)
            if is_coordinator:
                print(f"epoch {epoch}: held out {score:.4f}", flush=True)
            ckpt.metrics({"held_out": score})  # of this epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="folder for the versions of this run")
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--batch", type=int, default=24, help="windows per batch, over all ranks")
    parser.add_argument("--windows", type=int, default=1200, help="windows of an epoch")
    parser.add_argument("--length", type=int, default=32, help="bytes per window")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # without torchrun, this process is the only rank
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
