"""Trainings with Lightning, as scripts write them, for ``test_lightning``."""

import logging
import os
import random
import warnings
from contextlib import suppress

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import limpet
from limpet.errors import LimpetError
from limpet.integrations import frameworks
from limpet.integrations.lightning import Versions
from tests.frameworks.harness import reach

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Augmented(Dataset):
    """Samples that draw from all global generators. ``first``: a number that they begin with."""

    def __init__(self, length=20, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        x = torch.full((4,), (self.first + i) / 20) + 0.1 * torch.rand(4)
        return x + 0.1 * random.random() + 0.1 * float(np.random.random())


class Stream(IterableDataset):
    """A stream without a length and without a position."""

    def __iter__(self):
        return (torch.rand(4) + i / 20 for i in range(19))


class Model(pl.LightningModule):
    """``monitor``: of a plateau scheduler, if it is not empty."""

    def __init__(self, *, monitor="", one_cycle=False):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.monitor, self.one_cycle = monitor, one_cycle
        self.register_buffer("noise", torch.zeros(()))  # the same for a whole epoch

    def loss(self, x):
        if isinstance(x, dict):
            return sum(self.loss(part) for part in x.values())
        return (self.layers(x + self.noise) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * (1 + batch_idx / 100)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("seldom", loss + 1)
        return loss

    def on_train_epoch_start(self):
        reach(f"epoch {self.current_epoch}")
        self.noise.copy_(0.01 * torch.rand(()))

    def on_validation_start(self):
        reach(f"before validation after step {self.global_step}")

    def validation_step(self, batch, batch_idx):
        reach(f"validation after step {self.global_step}")
        self.log("val_loss", self.loss(batch) + 0.1 * torch.rand(()) + 0.1 * random.random())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.monitor:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": self.monitor, "strict": False}]
        if self.one_cycle:
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(run, model, *data, save=None, callbacks=(), options=None, **trainer):
    """Train. ``options``: of ``Versions``."""
    warnings.simplefilter("ignore")
    versions = Versions(run, save=save or limpet.EverySteps(1), quiet=True, **options or {})
    trainer = {"max_epochs": 2, **QUIET, **trainer}
    pl.Trainer(callbacks=[*callbacks, versions], **trainer).fit(model, *data)


def loaders(*, batch_size=4, **options):
    """Return the loaders of a training, and of a validation that draws."""
    options = {"shuffle": True} | options
    return (
        DataLoader(Augmented(), batch_size=batch_size, **options),
        DataLoader(Augmented(8), batch_size=4, shuffle=True),
    )


# -- the setups ------------------------------------------------------------------------------


class Manual(Model):
    """Two optimizers, one of which steps less often. ``carries``: the gradients of three batches
    make a step, also those of two epochs."""

    def __init__(self, *, carries=False):
        super().__init__()
        self.automatic_optimization = False
        self.carries = carries
        self.other = nn.Linear(4, 1)
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch) + self.other(batch).square().mean()
        self.log("loss", loss)
        self.manual_backward(loss)
        self.seen += 1
        if not self.carries or self.seen % 3 == 0:
            for optimizer in (first, second) if self.seen % 2 or self.carries else (first,):
                optimizer.step()
                optimizer.zero_grad()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.layers.parameters(), lr=0.02)
        second = torch.optim.SGD(self.other.parameters(), lr=0.02, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]


class Pretrained(Model):
    """Its optimizer gets the parameters of the backbone later."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4)

    def loss(self, x):
        return super().loss(self.backbone(x))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Skipping(Model):
    """Ends the epochs after three batches."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class Reloaded(pl.LightningDataModule):
    """Each epoch has other and more data. Its state is a number, which the training uses."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def train_dataloader(self):
        epoch = self.trainer.current_epoch
        return DataLoader(Augmented(12 + 4 * epoch, first=epoch), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Augmented(8, first=self.trainer.current_epoch), batch_size=4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.factor += 0.01
        return batch * self.factor

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor = state["factor"]


class Count(pl.Callback):
    """A callback with a state, which is loaded before it begins, and changes the model."""

    count = 0

    def on_fit_start(self, trainer, module):
        print("begins with", self.count, "of", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count = trainer.global_step
        module.layers[0].bias.data += self.count / 1000

    def on_train_end(self, trainer, module):
        module.layers[0].bias.data.zero_()  # no version has this

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class OwnOrder(torch.utils.data.Sampler):
    """Draws with replacement, from the global generator."""

    def __len__(self):
        return 18

    def __iter__(self):
        return iter(torch.randint(20, (18,)).tolist())


def stopping(monitor="val_loss", **options):
    return {"callbacks": [EarlyStopping(monitor, patience=1, min_delta=1, **options)]}


def several_loaders(mode):
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    other = DataLoader(Augmented(12), batch_size=4, shuffle=True)
    combined = {"first": other, "second": loader}
    return CombinedLoader(combined, mode) if mode else combined


def average():
    # not in Lightning 2.5
    kind = getattr(pl.callbacks, "EMAWeightAveraging", None)
    return [] if kind is None else [kind(decay=0.9)]


def scaler():
    """Return a precision plugin whose scaler changes often, and skips steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}


def inputs(name):
    """Return the model, the data, and the arguments of ``fit`` of a setup."""
    train, validation = loaders()
    every = limpet.EveryEpoch(), limpet.EverySteps(3)
    found = {
        "plain": (Model(), (train,), {}),
        "validation": (Model(), (train, validation), {}),
        "every epoch": (Model(), (train, validation), {"save": every[0]}),
        "every third step": (Model(), (train, validation), {"save": every[1]}),
        "workers": (Model(), loaders(num_workers=2, persistent_workers=True)[:1], {}),
        "accumulation": (Model(), (train, validation), {"accumulate_grad_batches": 3}),
        "accumulation by epoch": (
            Model(), (train,),
            {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
        ),
        "validation in mid-epoch": (Model(), (train, validation), {"val_check_interval": 2}),
        "validation between the batches of a step": (
            Model(), (train, validation),
            {"val_check_interval": 1, "accumulate_grad_batches": 2},
        ),
        "validation by batches": (
            Model(), (train, validation),
            {"val_check_interval": 4, "check_val_every_n_epoch": None},
        ),
        "validation by epochs": (
            Model(monitor="val_loss"), (train, validation),
            {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "max_epochs": 4},
        ),
        "plateau": (Model(monitor="val_loss"), (train, validation), {"max_epochs": 3}),
        "plateau of a mean": (Model(monitor="loss_epoch"), (train,), {"max_epochs": 3}),
        "early stopping": (
            Model(), (train, validation), {"max_epochs": 9, "val_check_interval": 2} | stopping(),
        ),
        "early stopping at an epoch": (
            Model(), (train,), {"max_epochs": 9} | stopping("loss_epoch"),
        ),
        "early stopping of Limpet": (
            Model(), (train, validation),
            {"max_epochs": 9, "options": {"stop": limpet.StopWhen("val_loss", patience=1)}},
        ),
        "manual": (Manual(), (train, validation), {}),
        "manual, carried": (Manual(carries=True), (train,), {"save": every[0] | every[1]}),
        "dict": (Model(), (several_loaders(""),), {}),
        "shortest": (Model(), (several_loaders("min_size"),), {}),
        "limited": (Model(), (train,), {"limit_train_batches": 3}),
        "maximum steps": (Model(), (train, validation), {"max_steps": 8, "max_epochs": -1}),
        "overfitted": (Model(), (train,), {"overfit_batches": 2}),
        "skipping": (Skipping(), (train,), {}),
        "one cycle": (Model(one_cycle=True), (train,), {}),
        "reloaded": (
            Model(), (Reloaded(),), {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}
        ),
        "scaler": (Model(), (train,), scaler()),
        "callback": (Model(), (train,), {"callbacks": [Count()]}),
        "finetuning": (
            Pretrained(), (train,), {"callbacks": [BackboneFinetuning(2)], "max_epochs": 4},
        ),
        "average": (Model(), (train, validation), {"callbacks": average()}),
        "stream": (Model(), (DataLoader(Stream(), batch_size=4),), {}),
        "sampler": (Model(), (loaders(shuffle=False, sampler=OwnOrder())[0],), {}),
    }  # fmt: skip
    return found[name]


def train(run, *, setup, **changes):
    model, data, options = inputs(setup)
    fit(run, model, *data, **options | changes)


def train_batches(run, *, batch_size):
    fit(run, Model(), loaders(batch_size=batch_size)[0])


def train_ranks(run, *, ranks=2):
    """Train on several ranks, whose BatchNorm differs."""
    callbacks = [EarlyStopping("val_loss", patience=9)]  # whose best value is of each rank
    callbacks += average()  # whose buffers are of each rank
    options = {"val_check_interval": 2, "max_epochs": 3, "callbacks": callbacks}
    fit(run, Model(), *loaders(), **ddp(ranks), **options)


def ddp(ranks):
    # without this option, DDP changes the order of its sums after the first step of a process
    strategy = "ddp_find_unused_parameters_true"
    return {"devices": ranks, "strategy": strategy} if ranks > 1 else {}


class Linear(Model):
    """A model that is the same on any number of ranks, up to rounding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 1)

    def on_train_epoch_start(self):
        pass


def train_changing_ranks(run):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fit(run, Linear(), loaders()[0], options={"total_batch_size": 6}, **ddp(ranks))


class Sharded(Linear):
    """A model for FSDP2."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def configure_model(self):
        if not isinstance(self.layers[0].weight, DTensor):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def train_sharded(run):
    strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo")
    fit(run, Sharded(), *loaders(), devices=2, strategy=strategy)


class Weighed(Model):
    """Logs the sum of its parameters after each step, and prints when it validates."""

    def weight(self):
        return sum(p.detach().double().sum() for p in self.parameters())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("weight", self.weight())

    def on_validation_end(self):
        print("tried" if self.trainer.sanity_checking else "validated at step", self.global_step)


def train_weighed(run, **options):
    fit(run, Weighed(), *loaders(), val_check_interval=2, **options)


def train_reloaded(run, *, every=2):
    data = Reloaded()
    original = data.train_dataloader

    def train_dataloader():
        print("loader of epoch", data.trainer.current_epoch)
        return original()

    data.train_dataloader = train_dataloader
    fit(run, Model(), data, reload_dataloaders_every_n_epochs=every, max_epochs=4)


# -- what is refused, and what saves nothing ----------------------------------------------------


class Raises(pl.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3:
            raise self.error


def train_until_error(run, *, interrupts):
    """Train until an exception after three steps."""
    save = limpet.EverySteps(100) | limpet.OnException()
    error = KeyboardInterrupt() if interrupts else ZeroDivisionError()
    try:
        fit(run, Model(), *loaders(), save=save, callbacks=[Raises(error)])
    except (ZeroDivisionError, SystemExit) as e:
        print("ended by", type(e).__name__)


class OtherLoaders(Reloaded):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def train_dataloader(self):
        loader = super().train_dataloader()
        return {f"part {number}": loader for number in range(1 + self.trainer.current_epoch)}


class DeepSpeedStrategy(pl.strategies.SingleDeviceStrategy):
    pass


class FSDPStrategy(pl.strategies.SingleDeviceStrategy):
    pass


class OwnMegatron(type("MegatronStrategy", (pl.strategies.SingleDeviceStrategy,), {})):
    pass


class XLAStrategy(pl.strategies.SingleDeviceStrategy):
    pass


def fit_twice(run):
    trainer = pl.Trainer(callbacks=[Versions(f"{run}-first", quiet=True)], max_epochs=1, **QUIET)
    for _ in range(2):
        trainer.fit(Model(), *loaders())


def fit_with_checkpoint(run):
    trainer = pl.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Model(), *loaders())
    trainer.save_checkpoint(f"{run}.ckpt")
    trainer = pl.Trainer(callbacks=[Versions(run)], max_epochs=2, **QUIET)
    trainer.fit(Model(), *loaders(), ckpt_path=f"{run}.ckpt")


def refuse(run, *, what):
    """Print the error of a training, which must come before its first step."""
    loader, own = loaders()[0], limpet.DataLoader(Augmented(), batch_size=4)
    swa = pl.callbacks.StochasticWeightAveraging(0.1)
    logger = pl.loggers.CSVLogger(os.path.dirname(run), name=os.path.basename(run))
    calls = {
        "option": lambda: Versions(run, saves=1),
        "resume": lambda: Versions(run, resume={"until": 3}),
        "total": lambda: Versions(run, total_batch_size=0),
        "twice": lambda: fit_twice(run),
        "two": lambda: fit(run, Model(), loader, callbacks=[Versions(run)]),
        "ckpt_path": lambda: fit_with_checkpoint(run),
        "batches": lambda: fit(run, Model(), [torch.rand(4, 4)]),
        "max_size": lambda: fit(run, Model(), several_loaders("max_size")),
        "own total": lambda: fit(run, Model(), own, options={"total_batch_size": 8}),
        "logger": lambda: fit(run, Model(), loader, logger=logger),
        "swa": lambda: fit(run, Model(), loader, callbacks=[swa]),
        "finder": lambda: fit(run, Model(), loader, callbacks=[pl.callbacks.LearningRateFinder()]),
    }
    for strategy in (DeepSpeedStrategy, FSDPStrategy, OwnMegatron, XLAStrategy):
        calls[strategy.__name__] = lambda s=strategy: fit(run, Model(), loader, strategy=s("cpu"))
    try:
        calls[what]()
    except LimpetError as e:
        print("refused:", e)
    assert limpet.Run(run).latest() is None


def reload_more(run):
    fit(run, Model(), OtherLoaders(), reload_dataloaders_every_n_epochs=1)


class Evaluated(Model):
    test_step = Model.validation_step

    def predict_step(self, batch):
        return self.layers(batch)


def save_nothing(run):
    """Validate, test, predict, and try a batch: no run is created."""
    versions = Versions(run)
    trainer = pl.Trainer(callbacks=[versions], **QUIET)
    model, (loader, validation) = Evaluated(), loaders()
    trainer.validate(model, validation, verbose=False)
    trainer.test(model, validation, verbose=False)
    trainer.predict(model, validation)
    pl.Trainer(callbacks=[versions], fast_dev_run=True, **QUIET).fit(model, loader, validation)
    assert versions.checkpointer is None


def warn(run, *, what):
    """Print the warnings of a training that is resumed within an epoch."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if what == "release":
            frameworks.version = lambda name: "3.1.0"
        files = pl.callbacks.ModelCheckpoint(run) if what == "files" else Raises(SystemExit(0))
        versions = Versions(run, save=limpet.EverySteps(1), quiet=True)
        options = QUIET | {"enable_checkpointing": what == "files"}
        trainer = pl.Trainer(callbacks=[files, versions], max_epochs=1, **options)
        with suppress(SystemExit):
            trainer.fit(Model(), loaders()[0])
    print(*(f"{w.category.__name__}: {w.message}" for w in found), sep="\n")
