"""Topic 9: the cost of every step, with or without a save: step(), OnException, the loader."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_STEPS = 300
_BLOCK = 8192
"""The number of indices over which the cost of a batch is averaged."""


def measure(folder: str) -> dict[str, list[float]]:
    """Return the microseconds of each call, by name.

    Runs in a child process.
    """
    import torch
    from torch.utils.data import DataLoader

    import limpet

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
    for size in (256, 32):
        loaders: dict[str, DataLoader[int]] = {
            "limpet": limpet.DataLoader(range(10**5), size, shuffle=True),
            "torch": DataLoader(range(10**5), size, shuffle=True),  # type: ignore[arg-type]
        }
        block = _BLOCK // size
        for name, loader in loaders.items():
            batches = iter(loader)
            timed(name, lambda batches=batches: next(batches), int, 10 * block)
            times = found.pop(name)  # means, because the indices of a block are computed at once
            found[f"{name} {size}"] = [
                sum(times[at : at + block]) / block for at in range(0, len(times), block)
            ]
        pairs = zip(found[f"limpet {size}"], found[f"torch {size}"], strict=True)
        found[f"more {size}"] = [mine - theirs for mine, theirs in pairs]
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
    for size in (256, 32):
        microseconds |= {
            f"torch {size}": (f"{size} samples of PyTorch's DataLoader", None),
            f"limpet {size}": (f"{size} samples of limpet.DataLoader", None),
            f"more {size}": ("the difference", 60.0 + 4.0 * size),
        }
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
