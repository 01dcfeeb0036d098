"""Train the model of ``train.py`` with FSDP2 on all ranks, and go on with any other number of them.

    torchrun --nproc-per-node 4 examples/fsdp.py runs/fsdp
    torchrun --nproc-per-node 3 examples/fsdp.py runs/fsdp    # goes on from there

Parameters and optimizer state are cut over the ranks. Each rank saves what it has, and a restart
reads of the snapshot what it needs. The batches follow one another as if nothing had happened:
``ElasticSampler`` counts samples of all ranks together.
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from train import Model

import holdfast


class Windows(Dataset):
    """Windows of ``length + 1`` bytes of a text, one beside the other."""

    def __init__(self, length: int) -> None:
        text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
        self.rows = text.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i].long()


class Loss(nn.Module):
    """How surprised the model is by the windows of a batch."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_sharded_model(options: argparse.Namespace) -> Loss:
    """The model and its loss, all parameters cut over all ranks."""
    torch.manual_seed(0)  # the same first parameters, whatever the number of ranks
    # without dropout, whose masks are each rank's own: so the loss does not depend on their number
    model = Model(options.width, options.layers, options.length, dropout=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(Loss(model), mesh=mesh)


def train(options: argparse.Namespace) -> None:
    loss_of = make_sharded_model(options)
    optimizer = torch.optim.AdamW(loss_of.parameters(), lr=3e-3)
    progress = holdfast.Progress()
    windows = Windows(options.length)
    sampler = holdfast.ElasticSampler(len(windows), batch_size=options.batch, drop_last=True)
    loader = DataLoader(windows, batch_sampler=sampler)
    state = {
        "model": loss_of.model,  # the same keys as those of train.py
        "optimizer": optimizer,
        "progress": progress,
        "sampler": sampler,
        "rng": holdfast.RNG(),
    }
    first = dist.get_rank() == 0
    with holdfast.Checkpointer(
        options.run, state, save=holdfast.EverySteps(options.every), keep=holdfast.KeepLast(2)
    ) as ckpt:
        found = ckpt.resume()
        if first:
            where = f"going on from step {found.step}" if found else "starting afresh"
            size = dist.get_world_size()
            print(f"{where} on {size} rank{'s' if size > 1 else ''}", flush=True)
        while progress.step < options.steps:
            for batch in loader:
                loss = loss_of(batch)
                optimizer.zero_grad()
                loss.backward()  # gradients are the mean over the ranks
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                ckpt.step({"loss": mean})
                if first:
                    print(f"step {progress.step:4}  loss {mean.item():.9f}", flush=True)
                if progress.step >= options.steps:
                    break
            else:
                progress.epoch += 1
        ckpt.save()  # the last state too, wherever the cadence stands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="folder for the versions of this run")
    parser.add_argument("--steps", type=int, default=200, help="train so many steps")
    parser.add_argument("--every", type=int, default=20, help="save every so many steps")
    parser.add_argument("--batch", type=int, default=24, help="windows in a batch, of all ranks")
    parser.add_argument("--length", type=int, default=32, help="bytes in a window")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # one process that was started without torchrun is a world of one
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
