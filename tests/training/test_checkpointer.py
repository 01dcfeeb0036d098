"""``Checkpointer``: resume is exact, failures are never silent, and one save runs at a time."""

import threading

import pytest
import torch

import limpet
from limpet.errors import (
    Denied,
    LimpetError,
    NoSnapshot,
    SkippedVersion,
    StoreError,
    Unavailable,
    Unsupported,
)
from limpet.format.names import MANIFEST, Version
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySeconds, EverySteps, KeepLast
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
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


def test_an_empty_run_resumes_to_none_and_trains():
    store = MemoryStore()
    with training(store, EverySteps(20), KeepLast(3)) as (state, ckpt):
        assert ckpt.resume() is None
        train(state, ckpt, 100)
    assert [s.step for s in Run(store).snapshots()] == [60, 80, 100]
    newest = Run(store).latest()
    assert newest is not None
    assert newest.metadata["reason"] == "cadence"
    assert newest.metadata["metrics"]["loss"] == state["history"][-1]
    assert reader_of(newest).manifest.parent is not None
    assert reader_of(newest).manifest.parent.version == "version_80"


@pytest.mark.parametrize(
    ("run", "what"),
    [("", "does not name a folder"), (None, "is not a store"), (["runs/a"], "is not a store")],
)
def test_a_run_without_a_folder_is_refused_at_once(run, what):
    """BEHAVIOURS.md, A27: by an error of Limpet's own tree, which is no ``ValueError``."""
    with pytest.raises(StoreError, match=what) as raised:
        limpet.Checkpointer(run, initial_state())
    assert "memory://" in str(raised.value.expected)


@pytest.mark.parametrize("killed_at", range(1, 45))
def test_a_run_stopped_at_any_step_ends_with_the_same_state(killed_at):
    store = MemoryStore()
    with training(store, EverySteps(7), KeepLast(2), at_end=False) as (state, ckpt):
        train(state, ckpt, killed_at)
    with training(store, EverySteps(7), KeepLast(2)) as (state, ckpt):
        snapshot = ckpt.resume()
        assert (0 if snapshot is None else snapshot.step) == killed_at // 7 * 7
        train(state, ckpt, 45)
    assert states_equal(state, state_after(45))


def test_resume_after_damage_continues_on_a_branch_from_the_previous_version():
    """Version 120 is damaged. The training resumes from 100 and reaches 120 again on branch 1."""
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
        assert Run(store).branch() == 1  # committed before training continues
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
        assert Run(store).branch() == 1  # resuming from the newest version starts no branch


@pytest.mark.parametrize("damage", ["manifest", "shard", "index", "missing", "truncated"])
def test_every_kind_of_damage_is_skipped(damage):
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
        if damage == "truncated":
            store.put_if_absent(shard, raw[: len(raw) // 2])
    with training(store, EverySteps(10)) as (state, ckpt), pytest.warns(SkippedVersion):
        snapshot = ckpt.resume()
    assert snapshot is not None
    assert snapshot.step == 10
    assert states_equal(state, state_after(10))


def test_a_run_with_only_damaged_versions_never_starts_from_scratch():
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    for step in (10, 20):
        flip_bit(store, shard_of(store, f"version_{step}"))
    before = {s.key for s in store.list("")}
    with training(store, EverySteps(10)) as (state, ckpt):
        with pytest.raises(NoSnapshot, match="version_10") as e:
            ckpt.resume()
        assert "not valid" in str(e.value.__cause__)
        with pytest.raises(LimpetError, match=r"last resume\(\) failed"):
            ckpt.step()
    assert {s.key for s in store.list("")} == before  # nothing was written


def test_save_commits_at_once_and_a_repeated_save_returns_the_same_version():
    store = MemoryStore()
    with training(store, EverySteps(1000)) as (state, ckpt):
        train(state, ckpt, 3)
        first = ckpt.save({"loss": 1.5})
        assert first.step == 3
        assert first.metadata["reason"] == "request"
        assert first.metadata["metrics"] == {"loss": 1.5}
        assert ckpt.save() == first
        train(state, ckpt, 4)
        assert ckpt.save().step == 4
    with training(store, EverySteps(1000)) as (state, ckpt):
        resumed = ckpt.resume()
        assert resumed is not None
        assert ckpt.save() == resumed


def test_without_progress_the_checkpointer_counts():
    store = MemoryStore()
    state = {"x": initial_state()["weights"]}
    with limpet.Checkpointer(store, state, save=EverySteps(3), at_end=False) as ckpt:
        for _ in range(7):
            ckpt.step()
        assert ckpt.current_step == 7
    with limpet.Checkpointer(store, state, save=EverySteps(3)) as ckpt:
        ckpt.resume()
        assert ckpt.current_step == 6


def test_every_seconds_uses_a_monotonic_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("limpet.training.cadence.time.monotonic", lambda: now[0])
    store = MemoryStore()
    with training(store, EverySeconds(60)) as (state, ckpt):
        for _ in range(10):
            train(state, ckpt, state["progress"].step + 1)
            now[0] += 25
    assert [s.step for s in Run(store).snapshots()] == [4, 7, 10]


class FailingStore(MemoryStore):
    """A store whose shards cannot be written while ``broken``."""

    broken = False

    def put(self, key, length):
        if self.broken:
            raise StoreError(f"no write of {key}", key=key, store=self.url)
        return super().put(key, length)


@pytest.mark.parametrize("call", ["step", "save", "wait", "close", "resume"])
def test_a_background_failure_raises_at_the_next_call(call):
    store = FailingStore()
    state = initial_state()
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(5))
    train(state, ckpt, 5)
    ckpt.wait()
    store.broken = True
    train(state, ckpt, 9)
    train_step(state)
    ckpt.step()  # starts the save of step 10, which fails
    assert ckpt._saver.pending is not None
    ckpt._saver.pending._thread.join()
    with pytest.raises(StoreError, match="no write"):
        getattr(ckpt, call)()
    store.broken = False
    if call != "close":
        train(state, ckpt, 15)  # the next save works
        ckpt.close()
        assert [s.step for s in Run(store).snapshots()] == [5, 15]
    else:
        assert [s.step for s in Run(store).snapshots()] == [5]


def test_an_exception_of_the_training_finishes_the_save_and_is_raised():
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
        raise ZeroDivisionError
    assert Run(store).latest() is not None


def test_the_state_may_change_as_soon_as_step_returns():
    store = MemoryStore()
    gate = threading.Event()
    put = store.put
    store.put = lambda *a: (gate.wait(5), put(*a))[1]
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
        state["weights"][:] = -1
        gate.set()
        ckpt.wait()
    assert (limpet.load(store.at("version_5"))["weights"] == state_after(5)["weights"]).all()


def test_an_unsupported_value_raises_at_the_step():
    store = MemoryStore()
    state = initial_state() | {"unsupported": object()}
    ckpt = limpet.Checkpointer(store, state, save=EverySteps(1))
    with pytest.raises(Unsupported, match="unsupported"):
        ckpt.step()
    assert list(store.list("")) == []
    ckpt.close()


def test_a_closed_checkpointer_raises():
    ckpt = limpet.Checkpointer(MemoryStore(), initial_state())
    ckpt.close()
    ckpt.close()
    with pytest.raises(LimpetError, match="closed"):
        ckpt.step()


class UnreadableFolderStore(MemoryStore):
    """A store that raises ``error`` when it reads the shards of one folder."""

    error: StoreError | None = None
    folder = "version_20"

    def get_range(self, key, offset, length, into):
        if self.error is not None and key.startswith(self.folder):
            raise self.error
        super().get_range(key, offset, length, into)


def test_a_version_that_the_disk_cannot_read_is_skipped():
    store = UnreadableFolderStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    store.error = StoreError("Cannot read: Input/output error")
    with training(store, EverySteps(10)) as (state, ckpt), pytest.warns(SkippedVersion):
        ckpt.resume()
    assert states_equal(state, state_after(10))


@pytest.mark.parametrize("kind", [Denied, Unavailable])
def test_an_unavailable_store_raises_and_skips_no_version(kind):
    store = UnreadableFolderStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    store.error = kind("not now")
    with training(store, EverySteps(10)) as (state, ckpt), pytest.raises(kind):
        ckpt.resume()
    assert Run(store).branch() == 0


@pytest.mark.parametrize("wrap", [limpet.PerRank, limpet.Replicated, lambda m: limpet.PerRank([m])])
def test_members_in_values_of_ranks_count_and_keep_their_random_numbers(wrap):
    """They are found as others are, and once."""
    store = MemoryStore()
    for expected in ([0, 1], [6, 7]):
        loader, progress = limpet.DataLoader(range(40), batch_size=2), limpet.Progress()
        state = {"loader": wrap(loader), "progress": wrap(progress), "again": [loader, progress]}
        state["rng"] = wrap(limpet.RNG())
        with limpet.Checkpointer(store, state, save=EverySteps(1), quiet=True) as ckpt:
            ckpt.resume()
            before = torch.get_rng_state()
            for _ in ckpt.epochs(1):
                assert torch.equal(torch.get_rng_state(), before)
                for number, batch in enumerate(loader):
                    assert number or batch.tolist() == expected
                    ckpt.step()
                    if number == 2:
                        break
                break
            assert progress.step == ckpt.current_step
