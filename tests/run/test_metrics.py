"""Metrics that are added later: evaluations of a version, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from math import inf, isnan, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import holdfast
from holdfast import events
from holdfast.errors import FormatError, HoldfastError, NotFound
from holdfast.format.names import MANIFEST, Version
from holdfast.format.records import Evaluation, decode_evaluation, encode_evaluation
from holdfast.run.catalog import new_evaluation
from holdfast.run.policy import EverySteps, KeepBest, KeepLast
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from tests.trainings import flip_bit, shard_of, state_after, train, trained_run, training

V20 = Version(20)


@pytest.fixture
def store() -> MemoryStore:
    """A training with versions 20, 40, 60, each with the metric ``loss``."""
    return trained_run()


@pytest.fixture
def told() -> Iterator[list[str]]:
    found: list[str] = []
    with events.attach(
        lambda name, fields: found.append(f"{fields['version']}") if name == "skipped" else None
    ):
        yield found


def evaluation_of(store: MemoryStore, step: int = 20) -> str:
    [key] = [s.key for s in store.list(f"version_{step}") if "/eval-" in s.key]
    return key


def best(store: MemoryStore, metric: str, mode: Any = "min") -> int | None:
    found = Run(store).best(metric, mode)
    return None if found is None else found.step


def test_the_save_has_metrics_of_its_own_and_evaluations_override_them(store: MemoryStore) -> None:
    run = Run(store)
    loss = run.open(V20).metadata["metrics"]["loss"]
    assert run.metrics(V20) == {"loss": loss}
    run.add_metrics(run.open(V20), {"loss": 0.5, "accuracy": 1})
    assert run.metrics(V20) == Run(store).metrics(V20) == {"loss": 0.5, "accuracy": 1}
    assert type(run.metrics(V20)["accuracy"]) is int
    assert run.open(V20).metadata["metrics"] == {"loss": loss}, "a snapshot never changes"


def test_of_a_metric_the_newest_number_wins_and_metrics_add_up(store: MemoryStore) -> None:
    run = Run(store)
    for number in range(12):  # attempts are random, and all of this is within a second
        run.add_metrics(V20, {"loss": number, f"only-{number % 2}": number})
    run.add_metrics(V20, {"recall": 0.5, "only-0": 7}, name="second")
    expected = {"loss": 11, "only-0": 7, "only-1": 11, "recall": 0.5}
    assert run.metrics(V20) == Run(store).metrics(V20) == expected


def test_a_clock_that_was_set_back_does_not_make_an_attempt_older() -> None:
    future = Evaluation("x", "0" * 12, "version_1", "0" * 32, "2199-12-31T23:59:59+00:00", {})
    made = new_evaluation("x", Version(1), "0" * 32, {}, [future])
    assert made.created == "2200-01-01T00:00:00+00:00"


@pytest.mark.parametrize("value", [nan, inf, -inf, -0.0, 0, 1 << 62, -(1 << 62), 1e-320, 0.1, -3])
def test_every_number_comes_back_as_it_was(store: MemoryStore, value: float) -> None:
    Run(store).add_metrics(V20, {"x": value})
    found = Run(store).metrics(V20)["x"]
    assert repr(found) == repr(value)


@settings(derandomize=True, max_examples=60)
@given(
    some.dictionaries(
        some.text(max_size=9), some.floats() | some.integers(-(1 << 63) + 1, (1 << 63) - 1)
    )
)
def test_any_metrics_go_to_a_file_and_back(metrics: dict[str, float]) -> None:
    made = new_evaluation("x", Version(1), "0" * 32, metrics, [])
    found = decode_evaluation(encode_evaluation(made), "f")
    assert repr(found.decoded_metrics()) == repr(metrics)


def test_tensors_and_arrays_of_one_element_are_read(store: MemoryStore) -> None:
    values = {"t": torch.tensor(2.5), "a": np.array([3]), "f": np.float32(0.5), "i": np.int64(7)}
    values |= {"long double": np.longdouble(0.25), "unsigned": np.uint64((1 << 64) - 1)}
    Run(store).add_metrics(V20, values)
    read = {"t": 2.5, "a": 3, "f": 0.5, "i": 7, "long double": 0.25, "unsigned": float(1 << 64)}
    assert {**Run(store).metrics(V20), "loss": 0} == {**read, "loss": 0}
    with training(store, EverySteps(1)) as (_, ckpt):
        ckpt.resume()
        ckpt.step(values)
        snapshot = ckpt.save()
    assert snapshot.metadata["metrics"] == read == Run(store).metrics(61)
    assert [type(v) for v in snapshot.metadata["metrics"].values()] == [
        type(v) for v in read.values()
    ]


@pytest.mark.parametrize("value", ["0.5", None, True, 1 << 63, 1j, [0.5], {"float": "nan"}])
def test_what_is_no_number_is_refused_by_name(store: MemoryStore, value: Any) -> None:
    with pytest.raises(HoldfastError, match=r"'accuracy' is not a number"):
        Run(store).add_metrics(V20, {"loss": 1.0, "accuracy": value})
    assert not [s for s in store.list("version_20") if "/eval-" in s.key]


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "../x", "é", "-a", "a" * 65, "a b", "a\n"])
def test_a_name_that_no_file_can_have_is_refused(store: MemoryStore, name: str) -> None:
    with pytest.raises(HoldfastError, match="is not a valid name for an evaluation"):
        Run(store).add_metrics(V20, {"loss": 1.0}, name=name)


def test_a_version_that_is_gone_or_damaged_is_not_evaluated(store: MemoryStore) -> None:
    with pytest.raises(NotFound):
        Run(store).add_metrics(Version(30), {"loss": 1.0})
    with pytest.raises(NotFound):
        Run(store).metrics(Version(30))
    flip_bit(store, f"version_20/{MANIFEST}")
    with pytest.raises(FormatError):
        Run(store).add_metrics(V20, {"loss": 1.0})
    with pytest.raises(FormatError):
        Run(store).metrics(V20)


def test_what_has_taken_the_place_of_what_was_evaluated_gets_no_metrics(store: MemoryStore) -> None:
    snapshot = Run(store).open(V20)
    Run(store).add_metrics(snapshot, {"loss": -1})
    for stat in list(store.list("version_20")):
        if "/eval-" not in stat.key:
            store.delete(stat.key)
    holdfast.save(store.at("version_20"), state_after(1), step=20)
    with pytest.raises(FormatError, match="not the snapshot that was evaluated"):
        Run(store).add_metrics(snapshot, {"loss": -2})
    assert Run(store).metrics(V20) == {}, "what is left of the old evaluation is of another one"


def test_damaged_evaluations_are_skipped_and_told_once(store: MemoryStore, told: list[str]) -> None:
    run = Run(store)
    loss = run.metrics(V20)["loss"]
    run.add_metrics(V20, {"loss": -1})
    key = evaluation_of(store)
    flip_bit(store, key, 100)
    store.put_if_absent("version_20/eval-x.000000000000.json", b"no JSON")
    store.put_if_absent("version_40/eval-x.000000000000.json", b"")
    for _ in range(2):
        assert run.metrics(V20) == {"loss": loss}
        assert run.best("loss") is not None
        run.retain(KeepLast(3) | KeepBest(1, "loss"))
    assert sorted(told) == sorted(
        [key, "version_20/eval-x.000000000000.json", "version_40/eval-x.000000000000.json"]
    )


def test_an_evaluation_under_another_name_or_in_another_folder_is_skipped(
    store: MemoryStore, told: list[str]
) -> None:
    Run(store).add_metrics(V20, {"loss": -1})
    key = evaluation_of(store)
    raw = store.get(key, 1 << 20)
    others = [key.replace("version_20", "version_40"), key.replace("evaluation", "other")]
    for other in others:
        store.put_if_absent(other, raw)
    assert Run(store).metrics(Version(40))["loss"] != -1
    store.delete(key)
    assert Run(store).metrics(V20)["loss"] != -1
    assert told == others


def test_a_version_goes_with_its_evaluations(store: MemoryStore) -> None:
    run = Run(store)
    run.add_metrics(V20, {"loss": 5})
    run.retain(KeepLast(1))
    assert list(store.list("version_20")) == []


# -- the best ------------------------------------------------------------------------------------


def test_the_best_by_metrics_added_later(store: MemoryStore) -> None:
    run = Run(store)
    for step, value in ((20, 0.3), (40, 0.1), (60, nan)):
        run.add_metrics(Version(step), {"val": value})
    assert best(store, "val") == 40
    assert best(store, "val", "max") == 20
    run.add_metrics(Version(60), {"val": 0.1})
    assert best(store, "val") == 60, "ties keep the newer"
    run.add_metrics(Version(60), {"val": nan})
    assert best(store, "val") == 40
    assert isnan(run.metrics(Version(60))["val"])
    assert best(store, "other") is None
    assert Run(MemoryStore()).best("val") is None


def test_the_best_is_intact_and_on_the_line(store: MemoryStore) -> None:
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=40)
        train(state, ckpt, 60)
    run = Run(store)
    for version, value in ((Version(20), 3), (Version(40), 2), (Version(60), 1)):
        run.add_metrics(version, {"val": value})
    run.add_metrics(Version(60, 1), {"val": 4})
    assert best(store, "val") == 40
    store.delete(shard_of(store, "version_40"))
    assert best(store, "val") == 20
    flip_bit(store, f"version_20/{MANIFEST}")
    found = run.best("val")
    assert found is not None
    assert found.version == Version(60, 1)


def test_keep_best_goes_by_what_evaluations_say(store: MemoryStore) -> None:
    run = Run(store)
    run.add_metrics(Version(20), {"val": 0.1})
    run.add_metrics(Version(40), {"val": 0.2})
    assert run.retain(KeepLast(1) | KeepBest(1, "val")) == [Version(40)]
    run.add_metrics(Version(20), {"val": 0.9})  # evaluated anew
    run.add_metrics(Version(60), {"val": 0.5})
    assert run.retain(KeepLast(1) | KeepBest(1, "val")) == [Version(20)]


# -- which version -------------------------------------------------------------------------------


class Step(IntEnum):
    FIRST = 20


@pytest.mark.parametrize("step", [np.int64(20), np.uint8(20), torch.tensor(20), Step.FIRST])
def test_a_step_is_a_whole_number_of_whatever_type(store: MemoryStore, step: Any) -> None:
    run = Run(store)
    run.add_metrics(step, {"val": 1})
    assert run.metrics(step)["val"] == 1
    assert run.find(step) == run.pin(step) == run.unpin(step) == Version(20)
    assert type(run.find(step).step) is int


@pytest.mark.parametrize("what", ["", "20", "version_20", None, 20.0, True, False, b"", object()])
def test_what_names_no_version_is_refused(store: MemoryStore, what: Any) -> None:
    run, before = Run(store), [s.key for s in store.list("")]
    with pytest.raises(HoldfastError, match="Expected a Snapshot, a Version, or a step") as caught:
        run.add_metrics(what, {"val": 1})
    assert repr(what)[:80] in str(caught.value)
    with pytest.raises(HoldfastError, match="Expected a Snapshot, a Version, or a step"):
        run.metrics(what)
    for use in (run.find, run.pin, run.unpin):
        with pytest.raises(HoldfastError, match="a whole number"):
            use(what)
        if what is not None:
            with pytest.raises(HoldfastError, match="a branch, a whole number"):
                use(20, what)
    assert [s.key for s in store.list("")] == before


def test_a_snapshot_has_metrics(store: MemoryStore) -> None:
    run = Run(store)
    run.add_metrics(40, {"val": 1})
    assert run.metrics(run.open(Version(40))) == run.metrics(40)
