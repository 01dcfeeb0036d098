"""Train on two workers of Ray Train. One of them is killed, and the training resumes by itself.

    python examples/ray_train.py --storage /tmp/results

Needs ``pip install "limpet[torch,ray-train]"``. It uses the Ray cluster in ``RAY_ADDRESS``, or else
starts one. A second start continues the training, with ``--epochs 8`` for example.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import limpet
from limpet.integrations.ray_train import checkpointer


def train_loop_per_worker(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(x, x.sum(1))
    layers = [torch.nn.Linear(16, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)]
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = limpet.DataLoader(data, total_batch_size=32, shuffle=True)  # divided among the workers
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    rank = ray.train.get_context().get_world_rank()
    with checkpointer(state, save=limpet.EverySteps(5), keep=limpet.KeepLast(3)) as ckpt:
        for epoch in ckpt.epochs(config["epochs"]):
            for inputs, targets in loader:
                loss = (model(inputs).squeeze(1) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.step({"loss": loss.detach()})
                if rank == 1 and ckpt.current_step == 24:
                    kill_once(Path(config["killed"]))
            if rank == 0:
                print(f"epoch {epoch} ended at step {ckpt.current_step}: loss {loss.item():.6f}")
            ray.train.report({"epoch": epoch, "loss": loss.item()})


def kill_once(killed: Path) -> None:
    """Kill this worker, as the kernel does when memory is short."""
    if not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default="ray-results")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    storage = Path(options.storage).absolute()
    storage.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"epochs": options.epochs, "killed": str(storage / "killed")},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="example",
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
    )
    run = limpet.Run(trainer.fit().path)
    for snapshot in run.snapshots():
        print(f"step {snapshot.step}: {snapshot.url}, loss {snapshot.metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
