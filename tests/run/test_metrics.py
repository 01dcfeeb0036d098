"""Metrics that are added after a save: evaluations of a version, and the best version."""

from enum import IntEnum
from math import inf, isnan, nan

import numpy as np
import pytest
import torch

import limpet
from limpet import events
from limpet.errors import FormatError, LimpetError, NotFound
from limpet.format.names import MANIFEST, Version
from limpet.format.records import Evaluation, decode_about_version
from limpet.run.policy import EverySteps, KeepBest, KeepLast
from limpet.run.records import put_about_version
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.trainings import flip_bit, shard_of, state_after, train, trained_run, training

V20 = Version(20)


@pytest.fixture
def store():
    """Return a run with versions 20, 40, and 60, each with the metric ``loss``."""
    return trained_run()


@pytest.fixture
def skipped():
    found: list[str] = []
    with events.attach(
        lambda name, fields: found.append(f"{fields['version']}") if name == "skipped" else None
    ):
        yield found


def evaluation_of(store, step=20):
    [key] = [s.key for s in store.list(f"version_{step}") if "/eval-" in s.key]
    return key


def best(store, metric, mode="min"):
    found = Run(store).best(metric, mode)
    return None if found is None else found.step


def test_evaluations_override_the_metrics_of_the_save(store):
    run = Run(store)
    loss = run.open(V20).metadata["metrics"]["loss"]
    assert run.metrics(V20) == {"loss": loss}
    run.add_metrics(run.open(V20), {"loss": 0.5, "accuracy": 1})
    assert run.metrics(V20) == Run(store).metrics(V20) == {"loss": 0.5, "accuracy": 1}
    assert type(run.metrics(V20)["accuracy"]) is int
    assert run.open(V20).metadata["metrics"] == {"loss": loss}, "a snapshot never changes"


def test_the_newest_value_of_each_metric_counts(store):
    run = Run(store)
    for number in range(12):  # attempts are random, and the loop takes less than a second
        run.add_metrics(V20, {"loss": number, f"only-{number % 2}": number})
    run.add_metrics(V20, {"recall": 0.5, "only-0": 7}, name="second")
    expected = {"loss": 11, "only-0": 7, "only-1": 11, "recall": 0.5}
    assert run.metrics(V20) == Run(store).metrics(V20) == expected


def test_a_new_evaluation_is_newest_although_the_clock_was_set_back():
    future = Evaluation("x", "0" * 12, "version_1", "0" * 32, "2199-12-31T23:59:59+00:00", {})
    assert stored({}, [future]).created == "2200-01-01T00:00:00+00:00"


def stored(metrics, earlier=()):
    store = MemoryStore()
    snapshot = Version(1), "0" * 32
    put_about_version(Evaluation, "x", snapshot, store, earlier, metrics=metrics)
    (stat,) = store.list("version_1")
    found = decode_about_version(store.get(stat.key, stat.length), stat.key)
    assert isinstance(found, Evaluation)
    return found


@pytest.mark.parametrize("value", [nan, inf, -inf, -0.0, 0, 1 << 62, -(1 << 62), 1e-320, 0.1, -3])
def test_every_number_is_restored_exactly(store, value):
    Run(store).add_metrics(V20, {"x": value})
    found = Run(store).metrics(V20)["x"]
    assert repr(found) == repr(value)


def test_tensors_and_arrays_of_one_element_are_numbers(store):
    values = {"t": torch.tensor(2.5), "a": np.array([3]), "f": np.float32(0.5), "i": np.int64(7)}
    values |= {"long double": np.longdouble(0.25), "unsigned": np.uint64((1 << 64) - 1)}
    Run(store).add_metrics(V20, values)
    expected = {"t": 2.5, "a": 3, "f": 0.5, "i": 7, "long double": 0.25, "unsigned": float(1 << 64)}
    assert {**Run(store).metrics(V20), "loss": 0} == {**expected, "loss": 0}
    with training(store, EverySteps(1)) as (_, ckpt):
        ckpt.resume()
        ckpt.step(values)
        snapshot = ckpt.save()
    assert snapshot.metadata["metrics"] == expected == Run(store).metrics(61)
    assert [type(v) for v in snapshot.metadata["metrics"].values()] == [
        type(v) for v in expected.values()
    ]


@pytest.mark.parametrize("value", ["0.5", None, True, 1 << 63, 1j, [0.5], {"float": "nan"}])
def test_the_error_for_an_invalid_number_names_the_metric(store, value):
    with pytest.raises(LimpetError, match=r"'accuracy' is not a number"):
        Run(store).add_metrics(V20, {"loss": 1.0, "accuracy": value})
    assert not [s for s in store.list("version_20") if "/eval-" in s.key]


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "../x", "é", "-a", "a" * 65, "a b", "a\n"])
def test_an_invalid_evaluation_name_is_rejected(store, name):
    with pytest.raises(LimpetError, match="The name of an evaluation or an author must be"):
        Run(store).add_metrics(V20, {"loss": 1.0}, name=name)


def test_a_deleted_or_damaged_version_cannot_be_evaluated(store):
    with pytest.raises(NotFound):
        Run(store).add_metrics(Version(30), {"loss": 1.0})
    with pytest.raises(NotFound):
        Run(store).metrics(Version(30))
    flip_bit(store, f"version_20/{MANIFEST}")
    with pytest.raises(FormatError):
        Run(store).add_metrics(V20, {"loss": 1.0})
    with pytest.raises(FormatError):
        Run(store).metrics(V20)


def test_a_version_that_replaced_the_evaluated_one_gets_no_metrics(store):
    snapshot = Run(store).open(V20)
    Run(store).add_metrics(snapshot, {"loss": -1})
    for stat in list(store.list("version_20")):
        if "/eval-" not in stat.key:
            store.delete(stat.key)
    limpet.save(store.at("version_20"), state_after(1), step=20)
    with pytest.raises(FormatError, match="not this snapshot any more"):
        Run(store).add_metrics(snapshot, {"loss": -2})
    for call in (Run(store).metrics, Run(store).evaluations, Run(store).delete):
        with pytest.raises(FormatError, match="not this snapshot any more"):
            call(snapshot)
    assert Run(store).metrics(V20) == {}, "the old evaluation belongs to another snapshot"


def test_damaged_evaluations_are_skipped_with_one_event(store, skipped):
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
    assert sorted(skipped) == sorted(
        [key, "version_20/eval-x.000000000000.json", "version_40/eval-x.000000000000.json"]
    )


def test_a_renamed_or_moved_evaluation_is_skipped(store, skipped):
    Run(store).add_metrics(V20, {"loss": -1})
    key = evaluation_of(store)
    raw = store.get(key, 1 << 20)
    others = [key.replace("version_20", "version_40"), key.replace("eval-metrics", "eval-other")]
    for other in others:
        store.put_if_absent(other, raw)
    assert Run(store).metrics(Version(40))["loss"] != -1
    store.delete(key)
    assert Run(store).metrics(V20)["loss"] != -1
    assert skipped == others


def test_best_uses_metrics_added_later(store):
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


def test_the_best_version_is_intact_and_on_the_lineage(store):
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
    assert run.best("val").version == Version(60, 1)


class Step(IntEnum):
    FIRST = 20


@pytest.mark.parametrize("step", [np.int64(20), np.uint8(20), torch.tensor(20), Step.FIRST])
def test_a_step_can_be_an_integer_of_any_type(store, step):
    run = Run(store)
    run.add_metrics(step, {"val": 1})
    assert run.metrics(step)["val"] == 1
    assert run.find(step) == run.pin(step) == run.unpin(step) == Version(20)
    assert type(run.find(step).step) is int


@pytest.mark.parametrize("value", ["", "20", "version_20", None, 20.0, True, False, b"", object()])
def test_arguments_that_name_no_version_are_rejected(store, value):
    run, before = Run(store), [s.key for s in store.list("")]
    with pytest.raises(LimpetError, match="must be a Snapshot, a Version, or a step") as caught:
        run.add_metrics(value, {"val": 1})
    assert repr(value)[:80] in str(caught.value)
    with pytest.raises(LimpetError, match="must be a Snapshot, a Version, or a step"):
        run.metrics(value)
    for use in (run.find, run.pin, run.unpin):
        with pytest.raises(LimpetError, match="a whole number"):
            use(value)
        if value is not None:
            with pytest.raises(LimpetError, match="a branch, a whole number"):
                use(20, value)
    assert [s.key for s in store.list("")] == before
