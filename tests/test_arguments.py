"""Every public call takes numbers of NumPy, and refuses other values before it does anything."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError
from limpet.storage.memory import MemoryStore


def kind_of(value):
    return f"{type(value).__name__} {value}"


Call = Callable[[MemoryStore, Any], object]


def save(store, step):
    return limpet.save(store, {"x": 1}, step=step)


def save_async(store, step):
    return limpet.save_async(store, {"x": 1}, step=step).wait()


def write(store, step):
    with limpet.Run(store).writer() as writer:
        return writer.save({"x": 1}, step=step)


def train(store, epochs=None, **options):
    state = {"x": np.zeros(1), "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.Never(), **options) as ckpt:
        if epochs is not None:
            assert len([*ckpt.epochs(epochs)]) == 2


def step_by(store, steps):
    state = {"x": np.zeros(1), "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.Never()) as ckpt:
        ckpt.step(steps=steps)


COUNTS: dict[str, Call] = {
    "EverySteps": lambda _, n: limpet.EverySteps(n),
    "EveryEpoch": lambda _, n: limpet.EveryEpoch(n),
    "AtSteps": lambda _, n: limpet.AtSteps([n]),
    "KeepLast": lambda _, n: limpet.KeepLast(n),
    "KeepEvery": lambda _, n: limpet.KeepEvery(n),
    "KeepSteps": lambda _, n: limpet.KeepSteps([n]),
    "KeepBest": lambda _, n: limpet.KeepBest(n, "loss"),
    "unscored": lambda _, n: limpet.KeepBest(1, "loss", unscored=n),
    "StopWhen": lambda _, n: limpet.StopWhen("loss", patience=n),
    "MemoryTier": lambda _, n: limpet.MemoryTier(every=limpet.EverySteps(1), copies=n),
    "save": save,
    "save_async": save_async,
    "writer": write,
    "incremental": lambda store, n: limpet.Run(store).writer(incremental=n),
    "epochs": train,
    "step": step_by,
    "full_every": lambda store, n: train(store, incremental=n),
}
SECONDS: dict[str, Call] = {
    "EverySeconds": lambda _, n: limpet.EverySeconds(n),
    "KeepEvery": lambda _, n: limpet.KeepEvery(seconds=n),
    "save": lambda store, n: limpet.save(store, {"x": 1}, timeout=n),
    "save_async": lambda store, n: limpet.save_async(store, {"x": 1}, timeout=n).wait(),
    "save_timeout": lambda store, n: train(store, save_timeout=n),
    "sweep": lambda store, n: limpet.Run(store).sweep(grace=n),
    "grace": lambda _, n: limpet.Preemption(grace=n),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2)], ids=kind_of)
def test_a_count_of_any_integer_type_is_taken(name, value):
    result = COUNTS[name](MemoryStore(), value)
    assert "np.int64" not in repr(result)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value", [-1, 2.0, True, np.float64(2), np.True_, "2", float("nan")], ids=kind_of
)
def test_another_value_is_refused_before_anything_is_written(name, value):
    if name in ("incremental", "full_every") and value is True:
        return  # a value of its own
    store = MemoryStore()
    with pytest.raises(LimpetError):
        COUNTS[name](store, value)
    assert [s.key for s in store.list("") if s.key.startswith(("version", "shard"))] == []


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize(
    "value", [60, 60.5, np.float32(60.5), np.float64(60), np.int32(60)], ids=kind_of
)
def test_seconds_of_any_real_type_are_taken(name, value):
    SECONDS[name](MemoryStore(), value)


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize(
    "value", [-1, -np.float32(1), True, np.True_, "60", float("nan"), 1j], ids=kind_of
)
def test_other_seconds_are_refused_before_anything_is_written(name, value):
    store = MemoryStore()
    with pytest.raises(LimpetError):
        SECONDS[name](store, value)
    assert [*store.list("")] == []


@pytest.mark.parametrize("step", [-1, True, 2.0, 10**18, "3"])
def test_the_error_about_a_step_is_one_sentence(step):
    with pytest.raises(LimpetError) as caught:
        save(MemoryStore(), step)
    message = str(caught.value)
    assert message.startswith("step must be a whole number, 0 or more, with at most 18 digits")
    assert message.count(". ") == 0


def test_a_step_of_numpy_is_stored_as_a_number():
    store = MemoryStore()
    limpet.save(store, {"x": 1}, step=np.int32(7))
    step = limpet.open(store).step
    assert (step, type(step)) == (7, int)
