"""Retention of a training with many versions follows some of the saves, and the end."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import Denied, SaveFailed
from holdfast.format.names import Version
from holdfast.run.policy import EverySteps, KeepLast, Never
from holdfast.run.retention import VERSIONS_PER_SAVE
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.training.checkpointer import Checkpointer
from tests.fakegroup import FakeGroup
from tests.trainings import initial_state, train, training


class UndeletableStore(MemoryStore):
    """Refuses deletions while ``broken``, and counts them."""

    broken = False
    refused = 0

    def delete(self, key: str) -> None:
        if self.broken and key.startswith("version_"):
            self.refused += 1
            raise Denied(f"Cannot delete {key}")
        super().delete(key)


def count_versions(store: MemoryStore) -> int:
    return len(Run(store).listing().folders)


@pytest.mark.parametrize("kept", [1, 2 * VERSIONS_PER_SAVE - 1, 4 * VERSIONS_PER_SAVE + 7])
def test_a_run_has_at_most_two_percent_more_versions_and_exactly_those_at_the_end(
    kept: int,
) -> None:
    store, most = MemoryStore(), 0
    with training(store, EverySteps(1), KeepLast(kept)) as (state, ckpt):
        for step in range(1, kept + 25):
            train(state, ckpt, step)
            ckpt.wait()
            most = max(most, count_versions(store))
    assert most == kept + max(1, kept // VERSIONS_PER_SAVE) - 1
    assert Run(store).line() == [Version(s) for s in range(25, kept + 25)]


def test_after_an_exception_the_first_retention_of_the_next_training_is_exact() -> None:
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


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_an_error_of_the_last_retention_says_that_the_save_succeeded(choice: Any) -> None:
    store, state, kept = UndeletableStore(), initial_state(), 2 * VERSIONS_PER_SAVE
    ckpt = Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(kept), on_error=choice)
    train(state, ckpt, kept + 1)
    ckpt.wait()
    store.broken = True
    if choice == "warn":
        with pytest.warns(SaveFailed, match=r"Old versions accumulate.*version_101 was saved"):
            ckpt.close()
    else:
        with pytest.raises(Denied, match=r"version_101 was saved, but old versions could not"):
            ckpt.close()
    assert store.refused == 1
    assert count_versions(store) == kept + 1


def test_a_retention_that_failed_is_repeated_after_the_next_save() -> None:
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


def test_only_explicit_saves_are_followed_by_retention_with_never() -> None:
    store, state = MemoryStore(), initial_state()
    with Checkpointer(store, state, save=Never(), keep=KeepLast(1)) as ckpt:
        for step in range(1, 4):
            train(state, ckpt, step)
            ckpt.save()
            assert Run(store).line() == [Version(step)]


def test_rank_0_alone_deletes_at_the_end() -> None:
    store, kept = UndeletableStore(), 2 * VERSIONS_PER_SAVE

    def work(rank: int) -> None:
        with training(store, EverySteps(1), KeepLast(kept)) as (state, ckpt):
            train(state, ckpt, kept + 2)

    with FakeGroup(2) as group:
        group.run(work)
    assert count_versions(store) == kept
