"""Topic 9: the cost of every step, with or without a save: step(), OnException, the loader."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_STEPS = 300
_BLOCK = 8192
"""The number of indices over which the cost of a batch is averaged."""


class Drawing:
    """A dataset of numbers that draw from Python's and NumPy's generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        random.random()
        np.random.random_sample()
        return index


def measure(folder: str) -> dict[str, list[float]]:
    """Return the microseconds of each call, by name.

    Runs in a child process.
    """
    import torch
    from torch.utils.data import DataLoader

    import limpet
    from limpet.data.epoch_order import EpochOrder

    found: dict[str, list[float]] = {}

    def timed(
        name: str, call: Callable[[], object], before: Callable[[], object], repeats: int = _STEPS
    ) -> None:
        for _ in range(repeats):
            before()
            start = time.perf_counter()
            call()
            found.setdefault(name, []).append(1e6 * (time.perf_counter() - start))

    def training(layers: int) -> tuple[dict[str, object], Callable[[], object]]:
        """Return a state, and a function that makes a step of its training."""
        model = torch.nn.Sequential(
            *(
                torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
                for _ in range(layers)
            )
        )
        optimizer = torch.optim.AdamW(model.parameters())

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()

        train()
        return {"model": model, "optimizer": optimizer, "progress": limpet.Progress()}, train

    never = limpet.EverySteps(10**9)
    for name, layers, policy, repeats in (
        ("step", 60, never, _STEPS),
        ("mark", 60, never | limpet.OnException(), _STEPS),
        ("mark ten times", 600, never | limpet.OnException(), _STEPS // 5),
    ):
        state, train = training(layers)
        with limpet.Checkpointer(f"{folder}/{name}", state, save=policy) as ckpt:
            ckpt.step({"loss": 1.0})
            timed(name, lambda ckpt=ckpt: ckpt.step({"loss": 1.0}), train, repeats)
    for size, dataset in product((256, 32, 1), (range(10**5), Drawing(10**5))):
        drawn = " drawn" * (dataset != range(10**5))
        own = limpet.DataLoader(dataset, size, shuffle=True)
        loaders: dict[str, DataLoader[int]] = {
            "limpet": own,
            "torch": DataLoader(dataset, size, shuffle=True),  # type: ignore[arg-type]
        }
        block = min(_BLOCK // size, 512)
        # in a state, so that it also seeds the steps
        with limpet.Checkpointer(f"{folder}/{size}{drawn}", {"loader": own}, save=never):
            for name, loader in loaders.items():
                batches = iter(loader)
                timed(name, lambda batches=batches: next(batches), int, 10 * block)
                times = found.pop(name)  # means: the indices of a block are computed at once
                found[f"{name} {size}{drawn}"] = [
                    sum(times[at : at + block]) / block for at in range(0, len(times), block)
                ]
        pairs = zip(found[f"limpet {size}{drawn}"], found[f"torch {size}{drawn}"], strict=True)
        found[f"more {size}{drawn}"] = [mine - theirs for mine, theirs in pairs]
    source = EpochOrder(range(10**5), None, is_shuffled=True, is_by_batch=False, drop_last=False)
    source.size = 256
    parts, block = source.parts(0, 0, 0, 1), _BLOCK // 256
    timed("order", lambda: next(parts), int, 10 * block)
    times = found.pop("order")
    found["order"] = [sum(times[at : at + block]) / block for at in range(0, len(times), block)]
    for length in (10**5, 10**9):
        for _ in range(20):
            old = limpet.DataLoader(range(length), 256, shuffle=True)
            state = {**old.state_dict(), "at": 37 * 256, "length": length}
            new = limpet.DataLoader(range(length), 256, shuffle=True)
            new.load_state_dict(state)
            timed(f"first {length:.0e}", lambda new=new: next(iter(new)), int, 1)
    return found


def sections(options: Options) -> list[Section]:
    title = "Cost of every step"
    text = (
        "The state has 1,140 leaves: 60 pairs of Linear and BatchNorm, with AdamW. step() does not"
        " save, and no save is requested. A forward pass in training mode, a backward pass, and an"
        " optimizer step run between the calls, because they evict the caches of the processor."
        " OnException copies everything that is not a parameter or optimizer slot at every step."
        " Loaders yield the numbers of a range, without workers. limpet.DataLoader computes the"
        f" indices of many batches at once; the figures are means over {_BLOCK:,} consecutive ones."
        " The limits are 60 us a batch, and 4 us a sample, or 15 if the dataset draws from Python"
        " and NumPy."
    )
    place = options.folder / "step"
    place.mkdir()
    try:
        found = fresh_process.call("bench.step:measure", folder=str(place))
    except fresh_process.MeasurementFailed as failure:
        return [Section(title, text, [], missing=[f"limpet: {failure}"])]
    finally:
        disk.remove(Path(place))
    microseconds = {
        "step": ("step() that does not save, 1,140 leaves", None),
        "mark": ("the same with OnException()", 500.0),
        "mark ten times": ("the same with OnException(), 11,400 leaves", 5000.0),
    }
    for size, drawn in product((256, 32, 1), ("", " drawn")):
        of, most = (", which draw from Python and NumPy,", 15.0) if drawn else ("", 4.0)
        samples = f"a batch of {size} samples{of}"
        microseconds |= {
            f"torch {size}{drawn}": (f"{samples} by PyTorch's DataLoader", None),
            f"limpet {size}{drawn}": (f"{samples} by limpet.DataLoader", None),
            f"more {size}{drawn}": (
                f"the difference: 60 us, and {most:g} us each",
                60 + most * size,
            ),
        }
    microseconds["order"] = "the order of a batch of 256", 35.0
    for length in (10**5, 10**9):
        label = f"the first batch of 256 after a resume, {length:,} samples"
        microseconds[f"first {length:.0e}"] = label, 5000.0
    return [
        Section(
            title,
            text,
            [
                judge(label, found[name], most=most, unit="us", digits=0)
                for name, (label, most) in microseconds.items()
            ],
        )
    ]
