"""Every optimizer and scheduler of PyTorch, and its kinds of modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils

from limpet import RNG
from tests.zoo.training import Training, batch, make_step, net, train

Build = Callable[[], Training]


def _public(module, base):
    """Return the classes of a module that derive from ``base``, also those of a later PyTorch."""
    return {
        name: member
        for name, member in vars(module).items()
        if isinstance(member, type)
        and issubclass(member, base)
        and member is not base
        and not name.startswith("_")
    }


def _optimizer_case(cls, options):
    if cls is torch.optim.SparseAdam:
        model: nn.Module = nn.Sequential(nn.Embedding(20, 4, sparse=True))
        rows = lambda x: model(x.abs().mul(5).long().clamp(max=19))  # noqa: E731
        return train(model, cls(model.parameters(), **options), (3, 2), rows)
    if cls is getattr(torch.optim, "Muon", None):
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
        return train(model, cls(model.parameters(), **options))
    model = net()
    return train(model, cls(model.parameters(), **{"lr": 0.01, **options}))


OPTIMIZER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.02, "betas": (0.5, 0.7), "fused": True}),
    ("AdamW", {"foreach": True, "capturable": False}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("LBFGS", {"history_size": 2, "line_search_fn": "strong_wolfe"}),
    ("Adafactor", {"beta2_decay": -0.5, "weight_decay": 0.1}),
]


def optimizers():
    classes = _public(torch.optim, torch.optim.Optimizer)
    cases: dict[str, Build] = {
        name: partial(_optimizer_case, cls, {}) for name, cls in classes.items()
    }
    for name, options in OPTIMIZER_OPTIONS:
        text = ", ".join(f"{k}={v}" for k, v in options.items())
        cases[f"{name}({text})"] = partial(_optimizer_case, classes[name], options)
    return cases | {
        "Adam(lr=tensor)": lambda: _optimizer_case(torch.optim.Adam, {"lr": torch.tensor(0.01)}),
        "Adam, two groups": _two_groups,
        "SGD, named parameters": _named_parameters,
        "Adam, frozen and unused parameters": _frozen,
        "Adam, bfloat16": _bfloat16,
        "Adam, of no module": _loose_parameters,
        "Adam and SGD of one model": _two_optimizers,
    }


def _two_groups():
    model = net()
    rest = {"params": model[4].parameters(), "lr": 0.1, "betas": (0.5, 0.6), "tag": "head"}
    return train(model, torch.optim.Adam([{"params": [*model[0].parameters()]}, rest], lr=0.01))


def _named_parameters():
    model = net()
    return train(model, torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9))


def _frozen():
    model = net()
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.randn(3)))
    return train(model)


def _bfloat16():
    model = net().bfloat16()
    return train(model, None, (), lambda x: model(x.bfloat16()))


def _loose_parameters():
    weight = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    step = make_step(lambda x: x.double() @ weight, optimizer)
    return Training({"weight": weight, "optimizer": optimizer}, step)


def _two_optimizers():
    model = net()
    body = torch.optim.Adam(model[0].parameters(), lr=0.1)
    head = torch.optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9)

    def step_head():
        head.step()
        head.zero_grad()

    step = make_step(model, body, after=step_head)
    return Training({"model": model, "optimizers": [body, head], "rng": RNG()}, step)


class Decay:
    """A callable object with a value of its own, as LambdaLR saves it."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, epoch):
        self.factor *= 0.99
        return float(self.factor**epoch)


def _cosine_after_warmup(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])


SCHEDULER_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay(0.9)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Decay(0.95)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Decay(0.9)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "SequentialLR": _cosine_after_warmup,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 3)]
    ),
}
"""How to create the schedulers that need more than an optimizer."""


def _scheduler_case(create, adam=False, lr=0.1):
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.02}]
    optimizer: Any = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if adam:
        optimizer = torch.optim.Adam(groups, lr=0.1)
    scheduler = create(optimizer)
    take_step = make_step(model, optimizer)

    def step(i):
        loss = take_step(i)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(loss))
        else:
            scheduler.step()
        return [float(loss), *(float(g["lr"]) for g in optimizer.param_groups)]

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNG()}
    return Training(state, step)


def schedulers():
    classes = _public(lr_scheduler, lr_scheduler.LRScheduler) | {"SWALR": swa_utils.SWALR}
    options: dict[str, Any] = {"SWALR": lambda o: swa_utils.SWALR(o, 0.05, 3), **SCHEDULER_OPTIONS}
    cases: dict[str, Build] = {
        name: partial(_scheduler_case, options.get(name, cls)) for name, cls in classes.items()
    }
    plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, cooldown=1, threshold=1e3)
    functions = [lambda epoch: 0.9**epoch, Decay(0.8)]
    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.2], total_steps=10)
    return cases | {
        "ReduceLROnPlateau that reduces": lambda: _scheduler_case(plateau),
        "LambdaLR with a function per group": lambda: _scheduler_case(
            lambda o: lr_scheduler.LambdaLR(o, functions)
        ),
        "OneCycleLR of Adam's betas": lambda: _scheduler_case(one_cycle, adam=True),
        "CyclicLR, exp_range": lambda: _scheduler_case(
            lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 1, mode="exp_range", gamma=0.9)
        ),
        "SequentialLR of a ChainedScheduler": lambda: _scheduler_case(_nested_schedulers),
        "LinearLR of a rate that is a tensor": lambda: _scheduler_case(
            lr_scheduler.LinearLR, lr=torch.tensor(0.1)
        ),
    }


def _nested_schedulers(o):
    chained = lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.StepLR(o, 1)], optimizer=o
    )
    return lr_scheduler.SequentialLR(o, [chained, lr_scheduler.ExponentialLR(o, 0.9)], [2])


class Tied(nn.Module):
    """An embedding and an output layer with one weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, max_norm=1.0)
        self.out = nn.Linear(6, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        out: torch.Tensor = self.out(self.embedding(x.abs().mul(5).long().clamp(max=19)))
        return out


class Counting(nn.Module):
    """A module with a state that is not a tensor, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.calls, self.inner = 0, nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def get_extra_state(self):
        return {"calls": self.calls, "name": ("counting", None)}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += 1
        out: torch.Tensor = self.inner(x) * self.scale * self.calls
        return out


def modules():
    linear = partial(nn.Linear, 6, 6)
    shaped: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "BatchNorm2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), (2, 2, 6, 6)),
        "InstanceNorm1d": (
            lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            (2, 4, 9),
        ),
        "tied weights": (Tied, (2, 3)),
        "weight_norm": (lambda: parametrizations.weight_norm(linear()), (4, 6)),
        "spectral_norm": (lambda: parametrizations.spectral_norm(linear()), (4, 6)),
        "orthogonal": (lambda: parametrizations.orthogonal(linear()), (4, 6)),
        "weight_norm by a hook": (lambda: torch.nn.utils.weight_norm(linear()), (4, 6)),
        "spectral_norm by a hook": (lambda: torch.nn.utils.spectral_norm(linear()), (4, 6)),
        "pruned": (lambda: prune.l1_unstructured(linear(), "weight", 0.3), (4, 6)),
        "extra state": (Counting, (4, 6)),
        "TransformerEncoderLayer": (
            lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True),
            (2, 4, 8),
        ),
        "compiled": (lambda: torch.compile(net(), backend="eager"), (4, 6)),
    }
    cases: dict[str, Build] = {
        name: partial(_module_case, create, shape) for name, (create, shape) in shaped.items()
    }
    return cases | {
        "LSTM": _lstm,
        "lazy modules": _lazy,
        "compiled in place": _compiled_in_place,
        "complex parameters": _complex,
        "AveragedModel": lambda: _averaged(swa_utils.AveragedModel),
        "AveragedModel, EMA": lambda: _averaged(
            lambda m: swa_utils.AveragedModel(
                m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
            )
        ),
        "GradScaler": _grad_scaler,
        "GradScaler, disabled": lambda: _grad_scaler(False),
        "torch.Generator": _generator,
    }


def _module_case(create, shape):
    return train(create(), None, shape)


def _lstm():
    model = nn.LSTM(6, 5, 2, dropout=0.1, bidirectional=True)
    return train(model, None, (4, 2, 6), lambda x: model(x)[0])


def _lazy():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    model(batch(0))  # materializes the parameters, which an optimizer needs
    return train(model)


def _compiled_in_place():
    model = net()
    model.compile(backend="eager")
    return train(model)


def _complex():
    model = nn.Linear(6, 3, dtype=torch.complex64)
    return train(model, None, (), lambda x: model(x.to(torch.complex64)).abs())


def _averaged(create):
    training = train(model := net())
    averaged = create(model)
    inner = training.step

    def step(i):
        loss = inner(i)
        averaged.update_parameters(model)
        return loss

    return Training({**training.state, "averaged": averaged}, step)


def _grad_scaler(enabled=True):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=enabled)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(i)).float().square().mean()
        scaled = scaler.scale(loss * (float("inf") if i == 2 else 1))  # step 2 is skipped
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        return [loss.detach(), scaler.get_scale()]

    state = {"model": model, "optimizer": optimizer, "scaler": scaler, "rng": RNG()}
    return Training(state, step)


class GeneratorState:
    """The usual way to save a generator."""

    def __init__(self):
        self.generator = torch.Generator()

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def _generator():
    generator = GeneratorState()
    generator.generator.manual_seed(torch.initial_seed() % 1000)
    return Training(
        {"generator": generator}, lambda i: torch.rand(3, generator=generator.generator)
    )


GROUPS: dict[str, Callable[[], dict[str, Build]]] = {
    "torch optimizers": optimizers,
    "torch schedulers": schedulers,
    "torch modules": modules,
}
