"""Retention of a training with many versions follows some of the saves, and the end."""

import time
import warnings
from types import SimpleNamespace

import pytest

import limpet
from limpet.buffers import shared_pool
from limpet.errors import Denied, LimpetError, SaveFailed
from limpet.format.names import MANIFEST, Version
from limpet.run.policy import (
    AtEnd,
    AtSteps,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    Never,
    StopWhen,
)
from limpet.run.retention import VERSIONS_PER_SAVE
from limpet.run.run import Run
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import flip_bit, initial_state, train, train_step, training
from tests.unreliable_stores import HookedStore


class UndeletableStore(MemoryStore):
    """Refuses deletions while ``broken``, and counts them."""

    broken = False
    refused = 0

    def delete(self, key):
        if self.broken and key.startswith("version_"):
            self.refused += 1
            raise Denied(f"Cannot delete {key}")
        super().delete(key)


def count_versions(store):
    return len(Run(store).listing().folders)


@pytest.mark.parametrize("kept", [1, 4 * VERSIONS_PER_SAVE + 7])
def test_a_run_has_at_most_two_percent_more_versions_and_exactly_those_at_the_end(kept):
    store, most = MemoryStore(), 0
    with training(store, EverySteps(1), KeepLast(kept)) as (state, ckpt):
        for step in range(1, kept + 25):
            train(state, ckpt, step)
            ckpt.wait()
            most = max(most, count_versions(store))
    assert most == kept + max(1, kept // VERSIONS_PER_SAVE) - 1
    assert Run(store).line() == [Version(s) for s in range(25, kept + 25)]


def test_after_an_exception_the_first_retention_of_the_next_training_is_exact():
    store, kept = MemoryStore(), 4 * VERSIONS_PER_SAVE
    with (
        pytest.raises(ZeroDivisionError),
        training(store, EverySteps(1), KeepLast(kept)) as (state, ckpt),
    ):
        train(state, ckpt, kept + 7)
        raise ZeroDivisionError
    assert kept < count_versions(store) <= kept + 4
    with training(store, EverySteps(1), KeepLast(kept)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, kept + 8)
        ckpt.wait()
        assert count_versions(store) == kept


def close_with_refused_deletion(ckpt, choice, saved):
    if choice == "warn":
        with pytest.warns(SaveFailed, match=f"{saved} was saved, but old versions"):
            ckpt.close()
    else:
        with pytest.raises(Denied, match=f"{saved} was saved, but old versions could not"):
            ckpt.close()


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_an_error_of_the_last_retention_says_that_the_save_succeeded(choice):
    store, state, kept = UndeletableStore(), initial_state(), 2 * VERSIONS_PER_SAVE
    ckpt = Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(kept), on_error=choice)
    train(state, ckpt, kept + 1)
    ckpt.wait()
    store.broken = True
    close_with_refused_deletion(ckpt, choice, "version_101")
    assert store.refused == 1
    assert count_versions(store) == kept + 1


def test_a_retention_that_failed_is_repeated_after_the_next_save():
    store, state, kept = UndeletableStore(), initial_state(), 4 * VERSIONS_PER_SAVE
    with Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(kept)) as ckpt:
        train(state, ckpt, kept)
        ckpt.wait()
        store.broken = True
        with pytest.raises(Denied, match="was saved"):
            for step in range(kept + 1, kept + 6):
                train(state, ckpt, step)
                ckpt.wait()
        store.broken = False
        train(state, ckpt, state["progress"].step + 1)
        ckpt.wait()
        assert count_versions(store) == kept


def test_only_explicit_saves_are_followed_by_retention_with_never():
    store, state = MemoryStore(), initial_state()
    with Checkpointer(store, state, save=Never(), keep=KeepLast(1)) as ckpt:
        for step in range(1, 4):
            train(state, ckpt, step)
            ckpt.save()
            assert Run(store).line() == [Version(step)]


@pytest.mark.parametrize("change", ["damaged", "replaced", "deleted"])
def test_a_manifest_that_changes_right_after_its_commit_is_not_relied_on(change):
    """Another process or a failing disk changes the newest version before retention begins."""
    inner = MemoryStore()
    store = HookedStore(inner)

    def after(method, key):
        if (method, key) != ("put_if_absent", f"version_2/{MANIFEST}"):
            return
        if change == "damaged":
            flip_bit(inner, key)
        else:
            for stat in list(inner.list("version_2")):
                inner.delete(stat.key)
        if change == "replaced":  # by one without metrics, whose files have other names
            location, metadata = Location(inner, "version_2"), VersionMetadata(step=2)
            finish_save(begin_save(location, {"x": 1}, metadata, shared_pool(), stage_now=False))

    store.after = after
    with training(store, EverySteps(1), KeepLast(1)) as (state, ckpt):
        train(state, ckpt, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(state, ckpt, 2)
            ckpt.wait()
        versions = {s.key.partition("/")[0] for s in inner.list("")}
        if change == "replaced":
            record = ckpt.run.catalog.read_version(Version(2), ckpt.run.listing())
            assert record is not None
            assert {*record.files} == {
                s.key for s in inner.list("version_2") if not s.key.endswith(MANIFEST)
            }
        else:
            assert "version_1" in versions, "the newest version is not intact"


def test_listed_steps_are_saved_and_kept_also_if_they_are_passed_over():
    store = MemoryStore()
    save, keep = EverySteps(4) | AtSteps([10, 15]), KeepSteps([10, 15, 100])
    with Checkpointer(store, initial_state(), save=save, keep=keep) as ckpt:
        for _ in range(12):
            ckpt.step(steps=2)
            ckpt.wait()
    assert [v.step for v in Run(store).line()] == [10, 16, 24]  # 24 is the newest


def test_versions_are_kept_by_the_seconds_of_training_across_restarts(monkeypatch):
    """A step takes a second. The time between the two processes does not count, nor does the
    clock that ``created`` shows."""
    store, now = MemoryStore(), [0.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("limpet.training.goodput.time", clocks)

    def train_to(last_step):
        keep = KeepEvery(seconds=5)
        with Checkpointer(store, initial_state(), save=EverySteps(2), keep=keep) as ckpt:
            ckpt.resume()
            while ckpt.current_step < last_step:
                now[0] += 1
                ckpt.step()
                ckpt.wait()

    train_to(8)
    assert [v.step for v in Run(store).line()] == [6, 8]
    now[0] += 1000
    train_to(24)
    assert [v.step for v in Run(store).line()] == [6, 10, 16, 20, 24]
    # 8 is deleted, because 6 stands for the second 5; 16 is the first one after second 15
    assert [r.trained_seconds for r in Run(store).records()] == [6, 10, 16, 20, 24]


def test_versions_that_record_no_time_are_kept_by_seconds():
    store = MemoryStore()
    for step in (1, 2, 3):
        limpet.save(store.at(f"version_{step}"), {"x": [step]}, step=step)
    assert Run(store).retain(KeepEvery(seconds=60)) == []
    assert Run(store).retain(KeepEvery(steps=2)) == [Version(1)]


def test_versions_wait_for_their_score():
    """The newest two without a score stay until an evaluation adds one, or newer ones come."""
    store, keep = MemoryStore(), KeepBest(1, "val", unscored=2)
    with Checkpointer(store, initial_state(), save=EverySteps(1), keep=keep) as ckpt:
        kept = []
        for step in range(1, 7):
            ckpt.step()
            ckpt.wait()
            kept.append([v.step for v in Run(store).line()])
            if step in (2, 4):
                Run(store).add_metrics(Version(step), {"val": 1.0 / step})
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(KeepBest(1, "vall"), [1, 4]), (KeepLast(2) | KeepBest(1, "vall"), [1, 3, 4])],
)
def test_nothing_is_deleted_for_a_metric_that_no_version_has(keep, expected):
    """It may be misspelled, or an evaluation in another process may add it later."""
    store = MemoryStore()
    with Checkpointer(store, initial_state(), save=EverySteps(1), keep=keep) as ckpt:
        for value in (0.1, 0.5, 0.4, 0.7):
            ckpt.step({"val": value})
    assert [v.step for v in Run(store).line()] == [1, 2, 3, 4]
    assert Run(store).retain(keep) == []
    Run(store).add_metrics(Version(1), {"vall": 0.1})
    Run(store).retain(keep)
    assert [v.step for v in Run(store).line()] == expected


def test_policies_with_opposite_modes_for_a_metric_are_refused():
    best, worst = KeepBest(1, "acc", mode="max"), KeepBest(1, "acc", mode="min")
    stop = StopWhen("acc", mode="max")
    for keep in (worst, KeepLast(1) | worst):
        with pytest.raises(
            LimpetError, match=r"KeepBest\(.*'min'.* and StopWhen\(.*'max'.* one mode"
        ):
            Checkpointer(MemoryStore(), initial_state(), keep=keep, stop=stop)
    other = KeepBest(1, "loss", mode="min")
    for keep in (best, best | worst, other, KeepLast(1)):
        Checkpointer(MemoryStore(), initial_state(), keep=keep, stop=stop).close()


# -- the last metrics ------------------------------------------------------------------------------


def kept(store):
    return [v.step for v in Run(store).line()]


BEST = KeepBest(1, "val", mode="min")


@pytest.mark.parametrize("add", ["metrics", "save", "end_epoch", "run"])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize(
    ("value", "keep", "expected"),
    [
        (0.1, BEST, [4]),  # 2 was the best before
        (0.9, BEST, [2, 4]),  # 4 is the newest
        (0.1, BEST | KeepLast(2), [3, 4]),
        (0.1, BEST | KeepSteps([2]), [2, 4]),
        (0.1, KeepBest(2, "val", mode="min"), [2, 4]),
        (0.1, KeepBest(1, "val", mode="max"), [1, 4]),
        (9.0, KeepBest(1, "val", mode="max", unscored=1), [4]),
    ],
)
def test_retention_decides_with_metrics_that_come_after_the_last_save(
    add, on_error, value, keep, expected
):
    store, scores = MemoryStore(), [0.8, 0.5, 0.6]
    with training(store, EverySteps(1), keep, on_error=on_error) as (state, ckpt):
        for score in scores:
            train_step(state)
            ckpt.step({"val": score})
            ckpt.wait()
        train(state, ckpt, 4)
        ckpt.wait()  # the retention after this save knows no score of 4
        if add == "run":
            Run(store).add_metrics(Version(4), {"val": value}, name="an-evaluation")
        else:
            getattr(ckpt, add)({"val": value})
    assert kept(store) == expected
    assert [*Run(store).listing().folders] == [*map(Version, expected)]


def test_the_last_save_carries_the_metrics_of_its_step():
    """With or without a save in flight, and when the epoch ends."""
    for ends in ("metrics", "end_epoch"):
        store = MemoryStore()
        with training(store, EverySteps(2) | AtEnd(), BEST) as (state, ckpt):
            for score in (0.9, 0.5, 0.4, 0.6, 0.1):
                train_step(state)
                ckpt.step()
                getattr(ckpt, ends)({"val": score})
        assert kept(store) == [5], ends


def test_metrics_of_the_version_of_a_resume_count_although_nothing_is_saved():
    store = MemoryStore()
    with training(store, EverySteps(1), BEST) as (state, ckpt):
        for score in (0.5, 0.6):
            train_step(state)
            ckpt.step({"val": score})
    assert kept(store) == [1, 2]
    with training(store, EverySteps(1), BEST) as (state, ckpt):
        ckpt.resume()
        ckpt.metrics({"val": 0.1})
    assert kept(store) == [2]


def test_a_training_that_only_resumes_deletes_nothing():
    store = MemoryStore()
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 3)
    with training(store, EverySteps(1), BEST) as (_, ckpt):
        ckpt.resume()
    assert kept(store) == [1, 2, 3]


def test_after_an_exception_the_last_metrics_delete_nothing():
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), training(store, EverySteps(1), BEST) as (state, ckpt):
        for score in (0.5, 0.6):
            train_step(state)
            ckpt.step({"val": score})
        ckpt.wait()
        ckpt.metrics({"val": 0.1})
        raise ZeroDivisionError
    assert kept(store) == [1, 2]


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_a_deletion_that_fails_at_the_end_is_reported(choice):
    store = UndeletableStore()
    ckpt = Checkpointer(store, initial_state(), save=EverySteps(1), keep=BEST, on_error=choice)
    for score in (0.5, 0.6):
        ckpt.step({"val": score})
        ckpt.wait()
    store.broken = True
    ckpt.metrics({"val": 0.1})
    close_with_refused_deletion(ckpt, choice, "version_2")
    assert kept(store) == [1, 2]


def test_a_policy_without_metrics_costs_the_end_nothing():
    """Retention of ``KeepLast`` is over after the last save."""
    for keep, looks in ((KeepLast(1), False), (None, False), (BEST, True)):
        store = HookedStore(MemoryStore())
        with training(store, EverySteps(1), keep) as (state, ckpt):
            train(state, ckpt, 3)
            ckpt.wait()
            lists: list[str] = []
            finish = ckpt._saver.retention.finish

            def count(newest, finish=finish, store=store, lists=lists):
                store.before = lambda method, key: lists.append(method)
                finish(newest)
                store.before = lambda method, key: None

            ckpt._saver.retention.finish = count
        assert bool(lists) == looks, keep


def test_a_writer_decides_with_the_metrics_that_were_added_in_its_block():
    run = Run(MemoryStore())
    with run.writer(keep=BEST) as writer:
        for step, score in ((1, 0.5), (2, 0.6)):
            snapshot = writer.save({"x": step}, step=step, metrics={"val": score})
        assert len(run.line()) == 2
        run.add_metrics(snapshot, {"val": 0.1})
    assert [v.step for v in run.line()] == [2]
    with run.writer(keep=KeepBest(1, "other")):
        pass  # it saves nothing, so it deletes nothing
    assert [v.step for v in run.line()] == [2]
