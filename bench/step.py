"""Topic 9: the cost of every step, with or without a save: step(), OnException, the sampler."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bench import disk, fresh_process
from bench.report import Options, Section, judge

_STEPS = 300


def measure(folder: str) -> dict[str, list[float]]:
    """Return the microseconds of each call, by name.

    Runs in a child process.
    """
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    import holdfast

    found: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object], before: Callable[[], object] = int) -> None:
        for _ in range(_STEPS):
            before()
            start = time.perf_counter()
            call()
            found.setdefault(name, []).append(1e6 * (time.perf_counter() - start))

    def state(layers: int) -> dict[str, object]:
        model = torch.nn.Sequential(
            *(
                torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
                for _ in range(layers)
            )
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        return {
            "model": model,
            "optimizer": optimizer,
            "progress": holdfast.Progress(),
            "rng": holdfast.RNG(),
        }

    never = holdfast.EverySteps(10**9)
    for name, layers, policy in (
        ("step", 60, never),
        ("mark", 60, never | holdfast.OnException()),
        ("mark ten times", 600, never | holdfast.OnException()),
    ):
        with holdfast.Checkpointer(f"{folder}/{name}", state(layers), save=policy) as ckpt:
            ckpt.step({"loss": 1.0})
            timed(name, lambda ckpt=ckpt: ckpt.step({"loss": 1.0}))
    for length in (10**5, 10**9):
        mine = iter(holdfast.ElasticSampler(length, 256))
        timed(f"sampler {length:.0e}", lambda mine=mine: next(mine))
    theirs = iter(BatchSampler(RandomSampler(range(10**5)), 256, drop_last=False))
    timed("RandomSampler", lambda: next(theirs))
    return found


def sections(options: Options) -> list[Section]:
    title = "Cost of every step"
    text = (
        "The state has 1,140 leaves: 60 pairs of Linear and BatchNorm, with AdamW. step() does not"
        " save, and no save is requested. OnException copies everything that is not a parameter or"
        " optimizer slot at every step. A batch of the samplers has 256 indices."
    )
    place = options.folder / "step"
    place.mkdir()
    try:
        found = fresh_process.call("bench.step:measure", folder=str(place))
    except fresh_process.MeasurementFailed as failure:
        return [Section(title, text, [], missing=[f"holdfast: {failure}"])]
    finally:
        disk.remove(Path(place))
    labels = {
        "step": "step() that does not save, 1,140 leaves",
        "mark": "the same with OnException()",
        "mark ten times": "the same with OnException(), 11,400 leaves",
        "sampler 1e+05": "a batch of ElasticSampler, 100,000 samples",
        "sampler 1e+09": "a batch of ElasticSampler, 1,000,000,000 samples",
        "RandomSampler": "a batch of PyTorch's BatchSampler(RandomSampler), 100,000 samples",
    }
    return [
        Section(
            title,
            text,
            [judge(label, found[name], unit="us", digits=0) for name, label in labels.items()],
        )
    ]
