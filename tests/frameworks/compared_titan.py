"""A training of torchtitan for ``compare``, saved by Limpet, or by torchtitan's own manager."""

import os

import torch.distributed as dist

from tests.frameworks import torchtitan_trainings as trainings  # isort: skip (finds torchtitan)
from torchtitan.components.checkpointer.dcp import CheckpointManager

from tests.frameworks.compare import EPOCHS, EVERY, STEPS_PER_EPOCH, finish


def train_torchtitan(run, *, own, noise):
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    steps = EPOCHS * STEPS_PER_EPOCH
    config = trainings.configure(run, steps=steps, loader={"draws": noise}, interval=EVERY)
    config.debug.seed = 0
    if own:
        config.checkpoint = CheckpointManager.Config(
            enable=True, folder=config.checkpoint.folder, interval=EVERY, last_save_model_only=False
        )
    trainer = config.build()
    trainer.train()
    finish(run, trainer.model_parts[0], trainer.optimizers, trainer.lr_schedulers)
    trainer.close()
    dist.destroy_process_group()
