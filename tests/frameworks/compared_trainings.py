"""A training in each framework for ``compare``, saved by Limpet, or by the framework's own way.

They resume from the newest checkpoint, and seed the generators, as examples of the frameworks do.
"""

from pathlib import Path

import accelerate
import lightning.pytorch as pl
import torch
import transformers
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import get_last_checkpoint

import limpet
from tests.frameworks.compare import EPOCHS, EVERY, STEPS_PER_EPOCH, finish
from tests.frameworks.harness import reach


class Samples(Dataset):
    """``noise``: a random augmentation."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 4 * STEPS_PER_EPOCH

    def __getitem__(self, i):
        return {"x": torch.arange(4.0) + i / 10 + (torch.randn(4) / 10 if self.noise else 0)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
        )

    def forward(self, x):
        return {"loss": (self.layers(x) - x.sum(1, keepdim=True)).square().mean()}


# -- Lightning -----------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Marks(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        reach(f"step {trainer.global_step}")


def train_lightning(run, *, own, noise):
    pl.seed_everything(0, verbose=False)
    newest = None
    if own:
        saves = pl.callbacks.ModelCheckpoint(run, every_n_train_steps=EVERY, save_top_k=-1)
        newest = max(Path(run).glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    else:
        from limpet.integrations.lightning import Versions

        saves = Versions(run, save=limpet.EverySteps(EVERY))
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[saves, Marks()],
        enable_checkpointing=own,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(Samples(noise), batch_size=4, shuffle=True), ckpt_path=newest)
    finish(run, module.net, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)


# -- Transformers --------------------------------------------------------------------------------


class StepMarks(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        reach(f"step {state.global_step}")


def train_transformers(run, *, own, noise):
    transformers.set_seed(0)
    arguments = transformers.TrainingArguments(
        f"{run}" if own else f"{run}.trainer",
        use_cpu=True,
        save_steps=EVERY,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        Net(), arguments, train_dataset=Samples(noise), callbacks=[StepMarks()]
    )
    newest = None
    if own:
        newest = get_last_checkpoint(run) if Path(run).exists() else None
    else:
        from limpet.integrations.transformers import attach

        attach(trainer, run)
    trainer.train(resume_from_checkpoint=newest)
    finish(run, trainer.model, trainer.optimizer, trainer.lr_scheduler)


# -- Accelerate ----------------------------------------------------------------------------------


def train_accelerate(run, *, own, noise):
    accelerate.utils.set_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader = DataLoader(Samples(noise), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def train_step(batch):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    if own:
        folders = [*Path(run).glob("step_*")]
        step = max((int(folder.name[5:]) for folder in folders), default=0)
        if step:
            accelerator.load_state(f"{run}/step_{step}")
        for epoch in range(step // STEPS_PER_EPOCH, EPOCHS):
            skipped = step - epoch * STEPS_PER_EPOCH
            batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
            for batch in batches:
                train_step(batch)
                step += 1
                reach(f"step {step}")
                if step % EVERY == 0:
                    accelerator.save_state(f"{run}/step_{step}")
    else:
        from limpet.integrations.accelerate import checkpointer

        loader = limpet.elastic(loader)
        with checkpointer(accelerator, run, save=limpet.EverySteps(EVERY)) as ckpt:
            for _ in ckpt.epochs(EPOCHS):
                for batch in loader:
                    train_step(batch)
                    reach(f"step {ckpt.current_step + 1}")
                    ckpt.step()
    finish(run, accelerator.unwrap_model(model), optimizer.optimizer, scheduler.scheduler)
