"""Early stopping by scores that a separate job records while the training goes on."""

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import Denied, SaveFailed, StoreError, Unavailable
from limpet.format.names import MANIFEST, EvaluationFile, Version, lease_name
from limpet.format.records import Evaluation, encode_record
from limpet.run.policy import EverySteps, KeepBest, KeepEvery, KeepLast, Never, StopState, StopWhen
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from limpet.training.early_stop import ScoreHistory
from tests.training.test_life import record_events
from tests.trainings import initial_state, missing_metrics, train
from tests.unreliable_stores import HookedStore

pytestmark = pytest.mark.filterwarnings("error")

STOP = StopWhen("val_loss", patience=3)


@contextmanager
def training(store=None, save=None, stop=STOP, **options):
    """A training that saves every step, and the run as another process sees it."""
    store, state = MemoryStore() if store is None else store, initial_state()
    save = EverySteps(1) if save is None else save
    with Checkpointer(store, state, save=save, stop=stop, **options) as ckpt:
        ckpt._watcher._closing.set()  # the tests call its polls
        yield state, ckpt, Run(getattr(store, "inner", store))


def save_next(state, ckpt, count=1):
    """Make steps, each one saved, and wait for what follows the save. Return the last step."""
    for _ in range(count):
        train(state, ckpt, state["progress"].step + 1)
        ckpt.wait()
    return int(state["progress"].step)


def record(run, **scores):
    """Record scores: ``v3=0.5`` is the score of version 3."""
    for version, score in scores.items():
        run.add_metrics(int(version[1:]), {"val_loss": score})


def copy_of(store):
    """Return what a store holds if the process dies now."""
    copied = MemoryStore()
    for stat in list(store.list("")):
        if stat.key != "writer.json":
            copied.put_if_absent(stat.key, store.get(stat.key, 1 << 30))
    return copied


def test_a_score_that_comes_when_no_save_is_near_stops_the_training():
    with training(save=Never(), stop=StopWhen("val_loss", patience=1)) as (state, ckpt, run):
        for step in (1, 2):
            train(state, ckpt, step)
            ckpt.save()
        record(run, v1=1.0, v2=2.0)
        train(state, ckpt, 3)
        assert not ckpt.should_stop
        ckpt._watcher.poll()
        train(state, ckpt, 4)
        assert ckpt.should_stop


def test_a_step_never_reads_the_store():
    store, calls = HookedStore(MemoryStore()), list[tuple[str, str]]()
    with training(store, Never(), keep=KeepLast(2)) as (state, ckpt, run):
        train(state, ckpt, 1)
        ckpt.save()
        record(run, v1=1.0)
        ckpt._watcher.poll()
        thread = threading.get_ident()
        store.before = lambda method, key: (
            calls.append((method, key)) if threading.get_ident() == thread else None
        )
        train(state, ckpt, 10)
        store.before = lambda method, key: None
        assert calls == []
        assert ckpt._early_stop._history.state == StopState(1.0)


def test_what_an_evaluator_records_before_it_unpins_counts():
    """It records its score, and then removes its pin, just before retention reads the pins."""
    store = HookedStore(MemoryStore())
    with training(store, keep=KeepLast(1), stop=StopWhen("val_loss", patience=9)) as (
        state,
        ckpt,
        run,
    ):
        save_next(state, ckpt)
        pin = pins.create_pin(run.location(Version(1)), "a" * 12, Version(1))
        save_next(state, ckpt)
        assert run.line() == [Version(1), Version(2)], "a pinned version is not deleted"

        def record_and_unpin(method, key):
            if (method, key) == ("list", "") and threading.current_thread().name == "limpet-save":
                store.before = lambda method, key: None
                record(run, v1=0.5)
                store.inner.delete(pin)

        store.before = record_and_unpin
        save_next(state, ckpt)
        train(state, ckpt, 4)
        assert ckpt._early_stop._history.state == StopState(0.5)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(width=16)), max_size=12), st.data())
def test_no_version_is_deleted_before_another_one_stores_its_score(scores, data):
    """A process that dies at any deletion loses no score: the next one counts all of them."""
    store, stop = HookedStore(MemoryStore()), StopWhen("val_loss", patience=100)
    seen: dict[int, float] = {}

    def check(method, key):
        version = key.removesuffix(f"/{MANIFEST}")
        step = int(version[8:]) if method == "delete" and key.endswith(MANIFEST) else None
        if step in seen:
            newest = Run(store.inner).snapshots()[-1]
            stored = newest.metadata["training"]["stop"]
            assert ScoreHistory.from_plain(stop, stored).covers(step, seen[step])

    store.before = check
    with training(store, keep=KeepLast(data.draw(st.integers(1, 3))), stop=stop) as (
        state,
        ckpt,
        run,
    ):
        for step, score in scores:
            existing = [v.step for v in run.line()]
            if step in existing:
                record(run, **{f"v{step}": score})
                seen[step] = score
            if not existing or data.draw(st.booleans()):
                save_next(state, ckpt)
        crashed = copy_of(store.inner)
        save_next(state, ckpt, 2)
        survived = ckpt._early_stop._history
        assert all(survived.covers(step, score) for step, score in seen.items())
    if seen:
        with training(crashed, stop=stop) as (state, ckpt, run):
            ckpt.resume()
            again = ckpt._early_stop._history
            assert all(again.covers(step, score) for step, score in seen.items())


def test_retention_deletes_at_the_next_save_what_it_kept_for_its_score():
    store = HookedStore(MemoryStore())
    with training(store, keep=KeepLast(2)) as (state, ckpt, run):
        save_next(state, ckpt, 2)
        store.before = lambda method, key: (
            record(run, v1=0.5)
            if (method, key) == ("put_if_absent", f"version_3/{MANIFEST}")
            else None
        )
        save_next(state, ckpt)
        store.before = lambda method, key: None
        assert run.line() == [Version(1), Version(2), Version(3)]
        save_next(state, ckpt)
        assert run.line() == [Version(3), Version(4)]
        stored = run.open(Version(4)).metadata["training"]["stop"]
        assert stored["scores"] == [[1, 0.5]]


def test_a_late_score_recomputes_the_result_until_the_training_has_decided():
    with training() as (state, ckpt, run):
        save_next(state, ckpt, 5)
        record(run, v1=1.0, v3=1.1, v4=1.2)
        save_next(state, ckpt, 2)
        assert ckpt._early_stop._history.state == StopState(1.0, 2)
        record(run, v5=1.3)
        ckpt._watcher.poll()  # these would stop the training
        record(run, v2=0.5, v4=0.4)
        ckpt._watcher.poll()
        save_next(state, ckpt)
        assert not ckpt.should_stop
        assert ckpt._early_stop._history.state == StopState(0.4, 1)
        record(run, v6=0.5, v7=0.6)
        ckpt._watcher.poll()
        save_next(state, ckpt)
        assert ckpt.should_stop
        record(run, v7=0.1)
        save_next(state, ckpt)
        assert ckpt.should_stop
    with training(run.store) as (state, ckpt, run):
        ckpt.resume()
        assert ckpt.should_stop, "a better score after the decision changes nothing"


def test_scores_that_come_while_the_training_is_down_count():
    with training() as (state, ckpt, run):
        save_next(state, ckpt, 4)
        record(run, v1=1.0, v2=1.5)
        save_next(state, ckpt, 2)
    record(run, v3=2.0)
    with training(run.store) as (state, ckpt, run):
        ckpt.resume()
        assert not ckpt.should_stop
        assert ckpt._early_stop._history.state == StopState(1.0, 2)
    record(run, v4=2.5)
    emitted, attached = record_events()
    with attached, training(run.store) as (state, ckpt, run):
        ckpt.resume()
        assert ckpt.should_stop
    [(_, fields)] = [e for e in emitted if e[0] == "stopped"]
    assert (fields["step"], fields["best"]) == (6, 1.0)


def test_the_newest_record_of_a_step_counts_whatever_the_clocks_say(monkeypatch):
    class Clock(datetime):
        hours = 0

        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=cls.hours)

    monkeypatch.setattr("limpet.run.records.datetime", Clock)
    with training(stop=StopWhen("val_loss", patience=9, mode="max")) as (state, ckpt, run):
        save_next(state, ckpt, 2)
        ckpt.step({"val_loss": 5.0})
        ckpt.wait()
        for hours, score in ((0, 3.0), (5, 7.0), (-20, 6.0)):
            Clock.hours = hours
            record(run, v1=score, v3=score)
        save_next(state, ckpt, 2)
        history = ckpt._early_stop._history
        assert history._scores == {1: 6.0, 3: 6.0}, "a record overrides the value of the step"
        record(run, v1=nan)
        save_next(state, ckpt, 2)
        assert history.state == StopState(6.0, 0)


def test_nan_counts_as_a_miss_and_version_0_counts():
    with training(save=Never()) as (state, ckpt, run):
        ckpt.save()
        for step in (1, 2, 3):
            train(state, ckpt, step)
            ckpt.save()
        record(run, v0=1.0, v1=nan, v2=nan, v3=1.0)
        ckpt._watcher.poll()
        train(state, ckpt, 4)
        assert ckpt.should_stop
        assert ckpt._early_stop._history.state == StopState(1.0, 3, True)


def test_scores_off_the_lineage_do_not_count():
    with training() as (state, ckpt, run):
        save_next(state, ckpt, 5)
        record(run, v1=1.0, v2=2.0, v4=3.0, v5=4.0)
        ckpt.resume(at=3)
        assert ckpt._early_stop._history.state == StopState(1.0, 1)
        save_next(state, ckpt, 2)
        old = run.open(Version(5))
        run.add_metrics(old, {"val_loss": 9.0})
        run.add_metrics(Version(4, 1), {"val_loss": 1.5})
        save_next(state, ckpt, 2)
        assert not ckpt.should_stop
        assert ckpt._early_stop._history.state == StopState(1.0, 2)


def test_a_poll_that_began_before_a_resume_changes_nothing():
    with training() as (state, ckpt, run):
        save_next(state, ckpt, 4)
        record(run, v1=1.0, v4=2.0)
        evaluations, resumed = ckpt.run.catalog.evaluations, []
        read = evaluations.read

        def resume_meanwhile(version, digest):
            if not resumed:
                resumed.append(True)
                ckpt.resume(at=2)
            return read(version, digest)

        evaluations.read = resume_meanwhile
        ckpt._watcher.poll()
        save_next(state, ckpt, 2)
        assert [*ckpt._early_stop._history._scores] == [1]


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_a_store_that_fails_while_records_are_read_is_reported(choice):
    """The version is committed, and nothing is deleted."""
    inner = MemoryStore()
    store = HookedStore(inner)

    def fail(method, key):
        if method == "list" and key.startswith("version_"):
            raise Denied(f"Cannot list {key}")

    with training(store, keep=KeepLast(1), on_error=choice) as (state, ckpt, run):
        save_next(state, ckpt)
        record(run, v1=1.0)
        store.before = fail
        train(state, ckpt, 2)
        ckpt._saver.pending.wait()
        told = "version_2 was saved, but the scores of evaluations could not be read"
        if choice == "warn":
            with pytest.warns(SaveFailed, match=told):
                ckpt.step()
        else:
            with pytest.raises(Denied, match=told):
                ckpt.step()
        assert Version(1) in run.line()
        assert Version(2) in run.line()
        if choice == "warn":  # this step was saved, too, and reports the same
            with pytest.raises(StoreError):
                ckpt.wait()
        store.before = lambda method, key: None
        save_next(state, ckpt, 2)
        assert ckpt._early_stop._history.state == StopState(1.0)


def test_a_poll_that_fails_is_reported_once_and_repeated():
    store = HookedStore(MemoryStore())
    emitted, attached = record_events()
    with attached, training(store, Never()) as (state, ckpt, run):
        train(state, ckpt, 1)
        ckpt.save()
        record(run, v1=1.0)

        def fail(method, key):
            raise Unavailable("down")

        store.before = fail
        for _ in range(3):
            ckpt._watcher.poll()
        store.before = lambda method, key: None
        ckpt._watcher.poll()
        train(state, ckpt, 2)
        assert ckpt._early_stop._history.state == StopState(1.0)
    assert [name for name, _ in emitted].count("request_unseen") == 1


def test_a_resume_that_cannot_read_the_records_raises():
    with training() as (state, ckpt, run):
        save_next(state, ckpt, 2)
    store = HookedStore(run.store)

    def fail(method, key):
        if method == "list" and key.startswith("version_"):
            raise Denied(f"Cannot list {key}")

    store.before = fail
    with training(store) as (state, ckpt, run):
        with pytest.raises(Denied):
            ckpt.resume()
        store.before = lambda method, key: None
        assert ckpt.resume() is not None


def test_a_damaged_record_is_skipped_and_reported():
    emitted, attached = record_events()
    with attached, training() as (state, ckpt, run):
        save_next(state, ckpt, 2)
        raw = encode_record(
            Evaluation("val", "a" * 12, "version_1", "0" * 32, "2026-01-01T00:00:00+00:00",
                       metrics={"val_loss": 0.1})
        )  # fmt: skip
        for name, content in (("val", raw), ("cut", raw[:-9])):
            run.store.put_if_absent(f"version_1/{EvaluationFile(name, 'a' * 12)}", content)
        record(run, v2=2.0)
        save_next(state, ckpt, 2)
        assert ckpt._early_stop._history.state == StopState(2.0)
    skipped = [fields["version"] for name, fields in emitted if name == "skipped"]
    assert sorted(skipped) == [f"version_1/eval-{n}.{'a' * 12}.json" for n in ("cut", "val")]


@pytest.mark.parametrize("sign", ["lease", "record", "nothing"])
def test_a_metric_that_no_evaluation_has_recorded_is_missing_unless_one_is_at_work(sign):
    keep = KeepLast(9) | KeepBest(1, "val_loss")
    with missing_metrics() as reported, training(keep=keep) as (state, ckpt, run):
        save_next(state, ckpt)
        if sign == "lease":
            run.store.put_if_absent(lease_name("val", 1), b"{}")
        elif sign == "record":
            run.add_metrics(1, {"other": 1.0})
        save_next(state, ckpt, 4)
        assert not reported
    found = ["loss", "other"] if sign == "record" else ["loss"]
    assert reported == ([] if sign == "lease" else [(["val_loss"], found)])


def test_scores_that_come_after_three_saves_are_not_missing():
    keep = KeepEvery(1) | KeepBest(1, "val_loss")
    with missing_metrics() as reported, training(keep=keep) as (state, ckpt, run):
        save_next(state, ckpt, 2)
        run.add_metrics(1, {"quick": 1.0})
        save_next(state, ckpt, 3)
        record(run, v1=1.0)
        save_next(state, ckpt, 2)
    assert not reported


def test_a_training_that_an_exception_ends_has_no_such_event():
    with missing_metrics() as reported, pytest.raises(ValueError, match="diverged"):  # noqa: SIM117
        with training(keep=KeepBest(1, "val_loss")) as (state, ckpt, _):
            save_next(state, ckpt)
            raise ValueError("diverged")
    assert not reported
