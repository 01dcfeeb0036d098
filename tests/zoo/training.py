"""A small training of the zoo, and what its state looks like without the help of Limpet."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass
class Training:
    """``state`` is what is saved. ``step(i)`` makes step ``i`` and returns its result, such as the
    loss. ``extra`` returns more values that must be equal, such as those of frozen objects."""

    state: dict[str, Any]
    step: Callable[[int], Any]
    extra: Callable[[], Any] = lambda: None


def look_at(training, results):
    """Return the bits of everything in the state, by path, as text."""
    seen = {"results": results, "extra": training.extra(), **training.state}
    return dict(_walk(seen, ""))


def _walk(value, path):
    match value:
        case torch.Tensor():
            yield from _walk_tensor(value, path)
        case nn.Module():
            yield from _walk({**value.state_dict(), **dict(value.named_buffers())}, path)
        case torch.optim.Optimizer():
            groups = [{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]
            parameters = [p for g in value.param_groups for p in g["params"]]
            slots = [value.state.get(p) for p in parameters]
            yield from _walk({"groups": groups, "parameters": parameters, "slots": slots}, path)
        case dict():
            yield path, f"{len(value)} members"
            for key, member in value.items():
                yield from _walk(member, f"{path}/{key}")
        case list() | tuple():
            yield path, f"{type(value).__name__} of {len(value)}"
            for i, member in enumerate(value):
                yield from _walk(member, f"{path}/{i}")
        case float():
            yield path, value.hex()
        case None | bool() | int() | str() | complex():
            yield path, repr(value)
        case _ if hasattr(value, "state_dict"):
            yield from _walk(value.state_dict(), path)
        case _ if hasattr(value, "tobytes"):
            yield path, f"{value.dtype}{value.shape} {hashlib.sha1(value.tobytes()).hexdigest()}"
        case _ if callable(value) or hasattr(value, "__dict__"):
            yield from _walk({"class": type(value).__name__, **vars(value)}, path)
        case _:
            yield path, repr(value)


def _walk_tensor(t, path):
    if type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        inner, _ = t.__tensor_flatten__()
        yield path, type(t).__name__
        yield from _walk({name: getattr(t, name) for name in inner}, path)
        return
    t = t.detach()
    if t.is_sparse:
        t = t.to_dense()
    raw = t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0)
    digest = hashlib.sha1(raw.numpy().tobytes()).hexdigest()
    yield path, f"{t.dtype}{tuple(t.shape)} {digest}"


def net():
    """Return a classifier of 6 features with batch statistics and random dropout."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


def batch(i, *shape):
    """Return the inputs of step ``i``, which do not depend on the global generator."""
    return torch.randn(shape or (4, 6), generator=torch.Generator().manual_seed(1000 + i))


def make_step(forward, optimizer, shape=(), after=lambda: None):
    """Return a function that makes one step of an optimizer, then calls ``after``."""

    def step(i):
        def closure():
            optimizer.zero_grad()
            loss = forward(batch(i, *shape)).float().square().mean()
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(partial(_same, closure, loss) if not _needs_closure(optimizer) else closure)
        after()
        return loss.detach()

    return step


def _same(closure, loss):
    return loss


def _needs_closure(optimizer):
    return isinstance(optimizer, torch.optim.LBFGS)


def train(model, optimizer=None, shape=(), forward=None):
    """Return the training of a model, by default with AdamW."""
    from limpet import RNG

    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    step = make_step(forward or model, optimizer, shape)
    return Training({"model": model, "optimizer": optimizer, "rng": RNG()}, step)
