"""What Lightning, Accelerate, torchmetrics, schedulefree, torchao, and torch-ema add to a state."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from limpet import RNG
from tests.zoo.training import Training, batch, make_step, net, train

Build = Callable[[], Training]


def lightning():
    logging.getLogger("lightning").setLevel(logging.ERROR)
    return {
        "Trainer": _lightning_trainer,
        "Trainer, two optimizers": partial(_lightning_trainer, manual=True),
        "Fabric": _fabric,
    }


def _lightning_module(manual):
    import torchmetrics
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = net(), torchmetrics.MeanMetric()
            self.seen.persistent(True)
            self.automatic_optimization = not manual
            parts = [self.net[0], self.net[4]] if manual else [self.net]
            # the same objects for each call of fit, so that one trainer makes one step at a time
            self.steps = [torch.optim.Adam(p.parameters(), lr=0.1) for p in parts]
            self.schedules = [torch.optim.lr_scheduler.StepLR(o, 2) for o in self.steps]

        def training_step(self, x, i):
            loss: torch.Tensor = self.net(x).square().mean()
            self.seen.update(loss.detach())
            if manual:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def configure_optimizers(self):
            return self.steps, self.schedules

    return Module()


def _lightning_trainer(manual=False):
    from lightning.pytorch import Trainer

    module = _lightning_module(manual)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )

    def step(i):
        trainer.fit_loop.max_epochs = i
        # a trainer that fits once more creates one iterator more, and each draws a random number
        data = batch(i).unsqueeze(0)
        own = torch.Generator()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None, generator=own))
        return [trainer.global_step, trainer.current_epoch, module.seen.compute()]

    state = {
        "model": module,
        "optimizers": module.steps,
        "schedulers": module.schedules,
        "loops": trainer.fit_loop,
        "rng": RNG(),
    }
    return Training(state, step)


def _fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    plain = net()
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters(), lr=0.1))

    def step(i):
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch(i)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    return Training({"model": model, "optimizer": optimizer, "rng": RNG()}, step)


def accelerate():
    return {
        "prepared": _prepared,
        "prepared, gradient accumulation": partial(_prepared, 2),
        "prepared, bfloat16": partial(_prepared, 1, "bf16"),
    }


def _prepared(accumulate=1, precision="no"):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision
    )
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
    model, optimizer, scheduler = accelerator.prepare(plain, sgd, schedule)

    def step(i):
        for k in range(accumulate):
            with accelerator.accumulate(model):
                loss = model(batch(10 * i + k)).float().square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return [loss.detach(), scheduler.get_last_lr()]

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNG()}
    return Training(state, step)


def torchmetrics():
    import torchmetrics as library
    from torchmetrics import classification, regression

    metrics: dict[str, Callable[[], Any]] = {
        "collection": lambda: library.MetricCollection(
            {
                "accuracy": classification.MulticlassAccuracy(3),
                "f1": classification.MulticlassF1Score(3),
                "auroc": classification.MulticlassAUROC(3),
                "confusion": classification.MulticlassConfusionMatrix(3),
            }
        ),
        "mean": library.MeanMetric,
        "cat": library.CatMetric,
        "running mean": lambda: library.RunningMean(window=2),
        "min and max": lambda: library.MinMaxMetric(regression.MeanSquaredError()),
        "correlation": regression.PearsonCorrCoef,
        "tracker": lambda: library.MetricTracker(regression.MeanSquaredError()),
        "bootstrapped": lambda: library.BootStrapper(regression.MeanSquaredError(), 3),
    }
    return {name: partial(_metric, create) for name, create in metrics.items()} | {
        "mean, not persistent": partial(_metric, library.MeanMetric, persistent=False)
    }


def _metric(create, persistent=True):
    metric = create()
    if persistent:
        for part in (metric, *metric.modules()):
            getattr(part, "persistent", lambda _: None)(True)

    def step(i):
        x, y = batch(i, 8, 3), batch(100 + i, 8, 3)
        if hasattr(metric, "increment") and (i == 1 or not hasattr(metric, "_base_metric")):
            metric.increment()
        match type(metric).__name__:
            case "MetricCollection":
                metric.update(x.softmax(1), y.argmax(1))
            case "MeanMetric" | "CatMetric" | "RunningMean":
                metric.update(x)
            case _:
                metric.update(x.reshape(-1), y.reshape(-1))
        return metric.compute()

    return Training({"metric": metric, "rng": RNG()}, step)


def schedulefree():
    import schedulefree as library

    classes = (
        library.AdamWScheduleFree,
        library.SGDScheduleFree,
        library.RAdamScheduleFree,
        library.AdamWScheduleFreeReference,
    )
    cases: dict[str, Build] = {}
    for cls in classes:
        cases[cls.__name__] = partial(_schedulefree, cls)
        cases[f"{cls.__name__}, saved in eval mode"] = partial(_schedulefree, cls, True)
    wrap = lambda p, lr: library.ScheduleFreeWrapper(torch.optim.SGD(p, lr=lr))  # noqa: E731
    return cases | {
        "ScheduleFreeWrapper": partial(_schedulefree, wrap),
        "ScheduleFreeWrapper, saved in eval mode": partial(_schedulefree, wrap, True),
    }


def _schedulefree(create, leave=False):
    model = net()
    optimizer = create(model.parameters(), lr=0.1)
    take_step = make_step(model, optimizer, after=optimizer.eval if leave else lambda: None)

    def step(i):
        optimizer.train()
        return take_step(i)

    return Training({"model": model, "optimizer": optimizer, "rng": RNG()}, step)


def torchao():
    from torchao import optim

    # to compile their steps takes a minute
    torch.compile = lambda function, **_: function
    names = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit")
    cases: dict[str, Build] = {
        f"optim.{name}": partial(_low_bit_optimizer, getattr(optim, name)) for name in names
    }
    return cases | {
        "optim._AdamW": partial(_low_bit_optimizer, optim._AdamW),
        "quantize_": _quantized,
    }


def _low_bit_optimizer(create):
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)
    )  # large enough for 8 bit
    return train(model, create(model.parameters(), lr=0.01), (4, 64))


def _quantized():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    quantize_(model, Int8WeightOnlyConfig())
    return train(model, torch.optim.SGD(model[1].parameters(), lr=0.1), (4, 64))


def torch_ema():
    return {"EMA": _ema, "EMA, saved while its weights are in use": partial(_ema, True)}


def _ema(store=False):
    from torch_ema import ExponentialMovingAverage

    training = train(model := net())
    ema = ExponentialMovingAverage(model.parameters(), decay=0.9)

    def step(i):
        if ema.collected_params is not None:
            ema.restore()
        loss = training.step(i)
        ema.update()
        if store:
            ema.store()
            ema.copy_to()
        return loss

    return Training({**training.state, "ema": ema}, step)


GROUPS: dict[str, Callable[[], dict[str, Build]]] = {
    "lightning": lightning, "accelerate": accelerate, "torchmetrics": torchmetrics,
    "schedulefree": schedulefree, "torchao": torchao, "torch_ema": torch_ema,
}  # fmt: skip
