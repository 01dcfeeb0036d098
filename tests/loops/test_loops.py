"""Each loop that people write is exact after it was killed: bit for bit, without a warning.

A case is trained without an interruption, and by several processes that are killed one after the
other. Compared are the bytes of each batch, the parameters and buffers after each step, the random
numbers that a step and the end of an epoch draw, the validations, and the last version.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.loops.datasets import SAMPLERS, STREAMS
from tests.loops.driver import check_in_process
from tests.loops.training import Case

ALL = "torch python numpy"
CHANGED = (0, 2, 1, 4)
WITH_STEPS = ("step 2", "batch 5", "step 13")
"""Kills for loops without epochs of their own."""

IN_STREAM = ("step 1", "batch 3", "validation 0", "epoch 1", "step 9")
"""Kills for an uneven stream, whose epochs have four batches."""

IN_RANKS = ("step 2", "validation 0", "epoch 1", "batch 5")
"""Kills for two ranks, whose epochs have three steps."""

CASES = {
    "one process": Case(data=ALL),
    "workers": Case(data=ALL, workers=2),
    "persistent workers": Case(data=ALL, workers=2, persistent=True),
    "changed workers": Case(data=ALL, workers=CHANGED),
    "torch": Case(data="torch", workers=(2, 0)),
    "python": Case(data="python", workers=(2, 0)),
    "numpy": Case(data="numpy", workers=(2, 0)),
    "rare draws": Case(data="rare", workers=(0, 2)),
    "generators of transforms": Case(data="own", workers=(0, 2)),
    "fetched by batch": Case(data=f"by-batch {ALL}", workers=(2, 0)),
    "random collate": Case(data=ALL, collate=True, workers=(0, 2)),
    "single samples": Case(data=ALL, single=True, kills=("step 2", "epoch 1", "step 50")),
    "pinned": Case(pin_memory=True, workers=1),
    "drop last": Case(drop_last=True, workers=CHANGED, kills=("batch 2", "validation 0", "step 9")),
    "growing": Case(data="growing torch", workers=(0, 2), kills=("step 3", "step 5", "step 8")),
    "manual": Case("manual", validation="torch with workers"),
    "no progress": Case(progress=False, kills=("validation 0", "epoch 1", "validation 1")),
    "validation inside": Case(inside=True, validation="limpet"),
    "validation inside, with workers": Case(
        workers=2, inside=True, validation="limpet with workers", epochs=2,
        kills=("step 2", "step 6", "batch 8"),
    ),
    "plain validation inside": Case(inside=True, validation="torch with workers"),
    "saved rarely": Case(save="EverySteps(4)", inside=True, lost=6),
    "exceptions": Case(
        save="OnException()", inside=True, workers=2, kills=("step 2!", "batch 5!", "batch 9!")
    ),
    "notices": Case(save="AtEnd()", workers=(0, 2), kills=("batch 1~", "batch 8~")),
    "saved in each epoch": Case(save="EveryEpoch()", lost=7),
    "killed while saving": Case(kills=("save 1", "save 4", "save 6", "save 12", "end 0")),
    "killed before the first save": Case(kills=("batch 0", "epoch 0", "save 1")),
    "killed at each end": Case(
        kills=("step 6", "validation 0", "epoch 1", "step 12", "validation 1", "epoch 2", "step 18")
    ),
    "break": Case("break", kills=("batch 2", "step 4", "validation 1")),
    "break, workers": Case("break", workers=2, kills=("step 2", "step 4", "epoch 2")),
    "continue": Case("continue", kills=("step 2", "batch 3", "epoch 1", "step 6", "step 9")),
    "exception in the loop": Case("caught", kills=("batch 1", "batch 2", "step 5", "epoch 2")),
    "exception in the data": Case("bad sample", "failing torch", workers=(0, 2)),
    "passes without steps": Case("statistics first", kills=("step 3", "validation 0", "step 8")),
    "two loaders": Case("zip", second=True),
    "endless second loader": Case("second endless", second=True, kills=("step 3", "step 8")),
    "numbers of batches": Case("numbered"),
    "accumulation, dropped": Case("dropped", lost=1, kills=("step 1", "epoch 1", "batch 2")),
    "accumulation, carried": Case("carried", lost=1, kills=("step 1", "epoch 1", "batch 1")),
    "accumulation, carried, workers": Case(
        "carried", lost=1, workers=CHANGED, kills=("step 1", "epoch 1", "batch 3")
    ),
    "accumulation, fewer": Case("fewer", kills=("step 1", "batch 1", "epoch 1", "batch 4")),
    "accumulation, after the pass": Case(
        "after the pass", kills=("step 1", "batch 1", "step 2", "epoch 1", "batch 4")
    ),
    "prefetched": Case("prefetched"),
    "prefetched, workers": Case("prefetched", data=ALL, workers=CHANGED),
    "peeks": Case("peeking"),
    "peeks, workers": Case(
        "peeking", data=ALL, workers=2, persistent=True, epochs=2, kills=("step 6", "batch 8")
    ),
    "several passes": Case(
        "several passes", epochs=2, kills=("step 3", "step 7", "step 12", "step 15")
    ),
    "endless passes": Case("endless passes", kills=("step 3", "step 6", "batch 8")),
    "early iterator": Case("early iterator", workers=(0, 2)),
    "steps": Case("steps", kills=WITH_STEPS),
    "steps of passes": Case("steps of passes", kills=("step 2", "step 6", "batch 12", "step 13")),
    "epochs in parts": Case("in parts"),
    "epochs, then steps": Case("two loops", kills=("step 2", "validation 0", "step 8")),
    **{
        f"sampler, {name}": Case(sampler=name, kills=("step 2", "epoch 1", "batch 8"))
        for name in SAMPLERS
    },
    "sampler, manual": Case("manual", sampler="generated", kills=("step 2", "batch 9")),
    "batch sampler": Case(sampler="lazy batches", workers=CHANGED),
    **{f"stream, {name}": Case(data=name, kills=IN_STREAM) for name in STREAMS},
    **{
        f"stream, {name}, workers": Case(data=name, workers=2, kills=IN_STREAM) for name in STREAMS
    },
    **{
        f"stream, {name}, persistent workers": Case(
            data=name, workers=2, persistent=True, kills=IN_STREAM
        )
        for name in ("uneven", "buffered")
    },
    "stream, buffered, short parts": Case(
        data="buffered", workers=4, kills=("step 7", "validation 0", "step 15")
    ),
    "stream, replayed": Case(data="positioned", replay=True, workers=2),
    "stream, drop last": Case(
        data="uneven", drop_last=True, workers=2, kills=("step 1", "validation 0", "step 3")
    ),
    "stream, single samples": Case(
        data="positioned", single=True, kills=("step 2", "epoch 1", "step 50")
    ),
    "stream, random collate": Case(data="positioned", collate=True, workers=2),
    "stream, peeks": Case(
        "peeking", "positioned", workers=2, persistent=True, epochs=2, kills=("step 3", "step 8")
    ),
    "stream, prefetched": Case("prefetched", "positioned", workers=2),
    "stream, carried": Case("carried", "lines", lost=1, kills=("step 1", "batch 3")),
    "stream, steps of passes": Case("steps of passes", "positioned", kills=("step 2", "step 7")),
    "two ranks": Case(ranks=2, kills=IN_RANKS),
    "two ranks, workers": Case(ranks=2, data=ALL, workers=(2, 0), kills=IN_RANKS),
    "three ranks": Case(ranks=3, kills=("step 2", "epoch 1", "batch 5")),
    "stream, two ranks": Case(ranks=2, data="positioned", workers=1),
    "changed ranks": Case(
        ranks=(2, 3, 1), total=6, data=ALL, drop_last=True,
        kills=("step 2", "epoch 1", "batch 5"),
    ),
    "changed ranks, sampler": Case(
        ranks=(2, 3, 1), total=6, sampler="generated", drop_last=True,
        kills=("step 2", "epoch 1", "batch 5"),
    ),
    "spawned workers": Case(data=ALL, workers=(0, 1), context="spawn", kills=("step 5",), epochs=1),
    "forkserver": Case(data=ALL, workers=(0, 1), context="forkserver", kills=("step 5",), epochs=1),
}  # fmt: skip


ONLY_AT_EACH_STEP = {
    *("torch", "python", "numpy", "break, workers", "prefetched, workers"),
    *("plain validation inside", "accumulation, carried, workers", "sampler, manual"),
    *("stream, sized, workers", "stream, lines, workers", "stream, uneven", "stream, drop last"),
    *("stream, uneven, persistent workers", "stream, single samples", "stream, prefetched"),
    *("stream, carried", "stream, steps of passes", "stream, peeks", "stream, uneven, workers"),
    *("stream, buffered, persistent workers", "stream, positioned, workers", "peeks, workers"),
    *("validation inside, with workers", "forkserver"),
    *("two ranks", "three ranks", "changed ranks, sampler"),
}
"""Cases that only `make test-chaos` runs: the others have each of their parts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ONLY_AT_EACH_STEP])
def test_a_killed_training_is_exact(name, memory):
    check_in_process(CASES[name], Path(memory))


ALL_STEPS, ODD, EVEN = slice(None), slice(0, None, 2), slice(1, None, 2)


def all_cases():
    """Each loop with two numbers of workers, which together are killed at each step."""
    for name, case in CASES.items():
        if case.save in ("AtEnd()", "OnException()"):  # SIGKILL would lose all steps
            continue
        others = []
        if case.workers == 0 and case.data not in STREAMS:
            others = [(CHANGED, f"{name}, changed workers")]
        elif case.context is None:
            others = [(4, f"{name}, 4 workers")]
        yield pytest.param(case, ODD if others else ALL_STEPS, id=name)
        for workers, other in others:
            yield pytest.param(replace(case, workers=workers), EVEN, id=other)


@pytest.mark.chaos
@pytest.mark.parametrize(("case", "steps"), [*all_cases()])
def test_a_training_that_is_killed_at_each_step_is_exact(case, steps, memory):
    check_in_process(case, Path(memory), steps)
