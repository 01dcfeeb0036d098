"""Trainings of Ray Train, whose workers, driver, and nodes are lost. Also a driver of its own."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import limpet


def train(run, *, make=limpet.Checkpointer, on_step=lambda step, start: None):
    """Train on two ranks. ``on_step``: called with the step, and with the one of the start."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.arange(160.0).reshape(40, 4) / 160
    loader = limpet.DataLoader(data, total_batch_size=10, shuffle=True, seed=1)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with make(state=state, run=run, save=limpet.EverySteps(2), quiet=True) as ckpt:
        ckpt.resume()
        start = ckpt.current_step
        for _ in ckpt.epochs(6):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                ckpt.step()
                on_step(ckpt.current_step, start)
        return ckpt.save()


def loop(config):
    """A ``train_loop_per_worker``. ``kill_at``: what is killed, with a step and its process."""
    import ray.train

    from limpet.integrations.ray_train import checkpointer

    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])

    def on_step(step, start):
        if rank == 0:
            for name, (kill_at, pid) in config.get("kill_at", {}).items():
                if step == kill_at and not (folder / name).exists():
                    (folder / name).touch()
                    os.kill(pid or os.getpid(), signal.SIGKILL)
                    time.sleep(30)
            (folder / f"step {step} of the start at {start}").touch()
        if (folder / "worker").exists() and start < 10:
            time.sleep(0.5)  # so that there is time for a drain

    snapshot = train(None, make=checkpointer, on_step=on_step)
    if rank == 0:
        limpet.Run(Path(snapshot.url).parent).pin(snapshot.step)
    storage = ray.train.get_context().get_storage()
    ray.train.report(
        {"steps": snapshot.step},
        checkpoint=ray.train.Checkpoint(snapshot.url, storage.storage_filesystem),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def fit(folder, *, max_failures=0, **config):
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":  # a driver that a worker kills
    import ray

    ray.init(logging_level="ERROR", log_to_driver=False)
    fit(sys.argv[1], kill_at={"driver": (5, os.getpid())})
