"""What a trainer holds: resume is exact, a failure is never silent, one save at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import holdfast
from holdfast.errors import (
    Denied,
    HoldfastError,
    MissingLeaf,
    NoSnapshot,
    SaveFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
    Unsupported,
)
from holdfast.format.names import MANIFEST, Version
from holdfast.run.policy import EverySeconds, EverySteps, KeepLast
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from tests.trainings import (
    flip_bit,
    initial_state,
    shard_of,
    state_after,
    states_equal,
    train,
    train_step,
    training,
)


def test_an_empty_run_resumes_to_none_and_trains() -> None:
    store = MemoryStore()
    with training(store, EverySteps(20), KeepLast(3)) as (state, ckpt):
        assert ckpt.resume() is None
        train(state, ckpt, 100)
    assert [s.step for s in Run(store).snapshots()] == [60, 80, 100]
    newest = Run(store).latest()
    assert newest is not None
    assert newest.metadata["reason"] == "cadence"
    assert newest.metadata["metrics"]["loss"] == state["history"][-1]
    assert newest.manifest.parent is not None
    assert newest.manifest.parent.version == "version_80"


@pytest.mark.parametrize("killed_at", range(1, 45))
def test_stopped_anywhere_and_resumed_the_end_is_the_same(killed_at: int) -> None:
    store = MemoryStore()
    with training(store, EverySteps(7), KeepLast(2)) as (state, ckpt):
        train(state, ckpt, killed_at)
    with training(store, EverySteps(7), KeepLast(2)) as (state, ckpt):
        snapshot = ckpt.resume()
        assert (0 if snapshot is None else snapshot.step) == killed_at // 7 * 7
        train(state, ckpt, 45)
    assert states_equal(state, state_after(45))


def test_damage_resumes_from_the_version_before_on_a_branch() -> None:
    """The issue's own case: 120 flipped, resume takes 100, reaches 120 again, which is latest."""
    store = MemoryStore()
    with training(store, EverySteps(20)) as (state, ckpt):
        train(state, ckpt, 120)
    flip_bit(store, shard_of(store, "version_120"))
    with training(store, EverySteps(20)) as (state, ckpt):
        with pytest.warns(SkippedVersion, match="version_120 is skipped.*damaged"):
            snapshot = ckpt.resume()
        assert snapshot is not None
        assert snapshot.step == 100
        assert states_equal(state, state_after(100))
        assert Run(store).branch() == 1  # committed before training goes on
        train(state, ckpt, 120)
    latest = Run(store).latest()
    assert latest is not None
    assert latest.version == Version(120, 1)
    assert latest.verify().ok
    assert states_equal(state, state_after(120))
    with training(store, EverySteps(20)) as (state, ckpt):
        again = ckpt.resume()
        assert again is not None
        assert again.version == Version(120, 1)
        assert Run(store).branch() == 1  # the newest needs no branch


@pytest.mark.parametrize("damage", ["manifest", "shard", "index", "missing", "cut"])
def test_every_kind_of_damage_is_stepped_over(damage: str) -> None:
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    shard = shard_of(store, "version_20")
    if damage == "manifest":
        flip_bit(store, f"version_20/{MANIFEST}", 40)
    elif damage == "shard":
        flip_bit(store, shard, 5000, 3)
    elif damage == "index":
        flip_bit(store, shard.replace(".safetensors", ".index.json"), 100)
    else:
        raw = store.get(shard, 1 << 30)
        store.delete(shard)
        if damage == "cut":
            store.put_if_absent(shard, raw[: len(raw) // 2])
    with training(store, EverySteps(10)) as (state, ckpt), pytest.warns(SkippedVersion):
        snapshot = ckpt.resume()
    assert snapshot is not None
    assert snapshot.step == 10
    assert states_equal(state, state_after(10))


def test_all_versions_damaged_raises_and_never_starts_afresh() -> None:
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    for step in (10, 20):
        flip_bit(store, shard_of(store, f"version_{step}"))
    with training(store, EverySteps(10)) as (state, ckpt):
        with pytest.raises(NoSnapshot, match="version_10") as e:
            ckpt.resume()
        assert "not valid" in str(e.value.__cause__)
        with pytest.raises(HoldfastError, match=r"last resume\(\) failed"):
            ckpt.step()
    assert len(list(store.list(""))) == 6  # nothing was written


def test_resume_at_an_older_version_starts_a_branch() -> None:
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 40)
    with training(store, EverySteps(10)) as (state, ckpt):
        snapshot = ckpt.resume(at=20)
        assert snapshot is not None
        assert states_equal(state, state_after(20))
        train(state, ckpt, 30)
    assert Run(store).line() == [Version(10), Version(20), Version(30, 1)]
    assert "on request" in Run(store).read_branch(1).reason
    with training(store, EverySteps(10)) as (state, ckpt), pytest.raises(NoSnapshot, match="40"):
        ckpt.resume(at=40)  # on the branch that was left


def test_training_afresh_into_a_run_with_versions_is_refused() -> None:
    store = MemoryStore()
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
    with training(store, EverySteps(5)) as (_, ckpt):
        with pytest.raises(HoldfastError, match=r"resume\(\)"):
            ckpt.step()
        with pytest.raises(HoldfastError, match=r"resume\(\)"):
            ckpt.save()


def test_save_commits_now_and_a_second_time_gives_what_is_there() -> None:
    store = MemoryStore()
    with training(store, EverySteps(1000)) as (state, ckpt):
        train(state, ckpt, 3)
        first = ckpt.save({"loss": 1.5})
        assert first.step == 3
        assert first.metadata["reason"] == "request"
        assert first.metadata["metrics"] == {"loss": 1.5}
        assert ckpt.save() is first
        train(state, ckpt, 4)
        assert ckpt.save().step == 4
    with training(store, EverySteps(1000)) as (state, ckpt):
        resumed = ckpt.resume()
        assert resumed is not None
        assert ckpt.save() is resumed


def test_without_progress_the_checkpointer_counts() -> None:
    store = MemoryStore()
    state = {"x": initial_state()["weights"]}
    with holdfast.Checkpointer(store, state, save=EverySteps(3)) as ckpt:
        for _ in range(7):
            ckpt.step()
        assert ckpt.current_step == 7
    with holdfast.Checkpointer(store, state, save=EverySteps(3)) as ckpt:
        ckpt.resume()
        assert ckpt.current_step == 6


def test_every_seconds_uses_a_clock_that_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("holdfast.training.cadence.time.monotonic", lambda: now[0])
    store = MemoryStore()
    with training(store, EverySeconds(60)) as (state, ckpt):
        for _ in range(10):
            train(state, ckpt, state["progress"].step + 1)
            now[0] += 25
    assert [s.step for s in Run(store).snapshots()] == [4, 7, 10]


class Failing(MemoryStore):
    """A store whose shards cannot be written while ``broken``."""

    broken = False

    def put(self, key: str, length: int) -> Any:
        if self.broken:
            raise StoreError(f"no write of {key}", key=key, store=self.url)
        return super().put(key, length)


@pytest.mark.parametrize("call", ["step", "save", "wait", "close", "resume"])
def test_a_background_failure_raises_at_the_next_call(call: str) -> None:
    store = Failing()
    state = initial_state()
    ckpt = holdfast.Checkpointer(store, state, save=EverySteps(5))
    train(state, ckpt, 5)
    ckpt.wait()
    store.broken = True
    train(state, ckpt, 9)
    train_step(state)
    ckpt.step()  # starts the save of step 10, which fails
    assert ckpt._saver._pending is not None
    ckpt._saver._pending._thread.join()
    with pytest.raises(StoreError, match="no write"):
        getattr(ckpt, call)()
    store.broken = False
    if call != "close":
        train(state, ckpt, 15)  # the next save works
        ckpt.close()
        assert [s.step for s in Run(store).snapshots()] == [5, 15]
    else:
        assert [s.step for s in Run(store).snapshots()] == [5]


def test_leaving_the_block_finishes_the_save_in_flight() -> None:
    store = MemoryStore()
    gate = threading.Event()
    put = store.put
    store.put = lambda *a: (gate.wait(5), put(*a))[1]  # type: ignore[method-assign]
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
        assert Run(store).latest() is None
        gate.set()
    assert Run(store).latest() is not None


def test_an_exception_in_training_still_finishes_the_save_and_passes_on() -> None:
    store = Failing()
    with pytest.raises(ZeroDivisionError) as e, training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
        raise ZeroDivisionError
    assert Run(store).latest() is not None
    store.broken = True
    with (
        pytest.warns(SaveFailed, match="no write"),
        pytest.raises(ZeroDivisionError) as e,
        training(store, EverySteps(5)) as (state, ckpt),
    ):
        ckpt.resume()
        train(state, ckpt, 10)
        raise ZeroDivisionError
    assert "no write" in "".join(e.value.__notes__)


def test_the_state_may_change_as_soon_as_step_returns() -> None:
    store = MemoryStore()
    gate = threading.Event()
    put = store.put
    store.put = lambda *a: (gate.wait(5), put(*a))[1]  # type: ignore[method-assign]
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
        state["weights"][:] = -1
        gate.set()
        ckpt.wait()
    assert (holdfast.load(store.at("version_5"))["weights"] == state_after(5)["weights"]).all()


def test_a_failed_retention_does_not_undo_the_save_but_is_raised() -> None:
    store = MemoryStore()
    with training(store, EverySteps(5), KeepLast(1)) as (state, ckpt):
        train(state, ckpt, 5)
        ckpt.wait()
        delete = store.delete

        def refuse(key: str) -> None:
            if MANIFEST in key:
                raise StoreError(f"no delete of {key}")
            delete(key)

        store.delete = refuse  # type: ignore[method-assign]
        train(state, ckpt, 10)
        with pytest.raises(StoreError, match="no delete"):
            ckpt.wait()
        assert [s.step for s in Run(store).snapshots()] == [5, 10]
        store.delete = delete  # type: ignore[method-assign]


def test_a_state_that_does_not_fit_is_refused_not_skipped() -> None:
    store = MemoryStore()
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 10)
    other = initial_state() | {"more": initial_state()["weights"]}
    with (
        holdfast.Checkpointer(store, other, save=EverySteps(5)) as ckpt,
        pytest.raises(MissingLeaf, match="more"),
    ):
        ckpt.resume()
    assert Run(store).branch() == 0


def test_what_cannot_be_kept_is_refused_at_the_step() -> None:
    store = MemoryStore()
    state = initial_state() | {"bad": object()}
    ckpt = holdfast.Checkpointer(store, state, save=EverySteps(1))
    with pytest.raises(Unsupported, match="bad"):
        ckpt.step()
    assert list(store.list("")) == []
    ckpt.close()


def test_a_closed_checkpointer_says_so() -> None:
    ckpt = holdfast.Checkpointer(MemoryStore(), initial_state())
    ckpt.close()
    ckpt.close()
    with pytest.raises(HoldfastError, match="closed"):
        ckpt.step()


def test_buffers_are_reused_and_no_thread_is_left() -> None:
    before = threading.active_count()
    store = MemoryStore()
    with training(store, EverySteps(1), KeepLast(1)) as (state, ckpt):
        train(state, ckpt, 3)
        ckpt.wait()
        allocated = ckpt._saver._pool.allocated_bytes
        train(state, ckpt, 20)
        ckpt.wait()
        assert ckpt._saver._pool.allocated_bytes == allocated
        assert ckpt.statistics()["saves"] == 20
    assert ckpt._saver._pool.allocated_bytes == 0
    assert threading.active_count() == before


class BadSector(MemoryStore):
    """A store that cannot read one folder's shards, for a reason."""

    error: StoreError | None = None
    folder = "version_20"

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        if self.error is not None and key.startswith(self.folder):
            raise self.error
        super().get_range(key, offset, length, into)


def test_a_version_that_the_disk_cannot_read_is_stepped_over() -> None:
    store = BadSector()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    store.error = StoreError("Cannot read: Input/output error")
    with training(store, EverySteps(10)) as (state, ckpt), pytest.warns(SkippedVersion):
        ckpt.resume()
    assert states_equal(state, state_after(10))


@pytest.mark.parametrize("kind", [Denied, Unavailable])
def test_a_store_that_does_not_answer_loses_no_steps(kind: type[StoreError]) -> None:
    store = BadSector()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    store.error = kind("not now")
    with training(store, EverySteps(10)) as (state, ckpt), pytest.raises(kind):
        ckpt.resume()
    assert Run(store).branch() == 0
