"""Ranks that are threads: what they save and load together, in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.storage.memory import MemoryStore
from holdfast.testing.fakegroup import FakeGroup


def save_on_ranks(*states: Any, store: Any = None) -> MemoryStore:
    """Where the ranks have saved these states, one each."""
    store = MemoryStore() if store is None else store
    with FakeGroup(len(states)) as group:
        group.run(lambda rank: holdfast.save(store, states[rank]))
    assert holdfast.open(store).verify().ok
    return store


def save_error(kind: type[Exception], *states: Any) -> Any:
    """What all ranks raise that save these states: that error, and nothing is written."""
    store = MemoryStore()
    with FakeGroup(len(states)) as group:
        told = group.outcomes(lambda rank: holdfast.save(store, states[rank]))
    _assert_same_error(told, kind)
    assert not list(store.list(""))
    assert not list(store.partials(""))
    return told[0]


def load_on_ranks(store: Any, *lives: Any, **options: Any) -> None:
    """The ranks load into these states, one each."""
    with FakeGroup(len(lives)) as group:
        group.run(lambda rank: holdfast.load(store, into=lives[rank], **options))


def load_errors(store: Any, kind: type[Exception], *lives: Any, **options: Any) -> list[Any]:
    """What all ranks raise that load into these states."""
    with FakeGroup(len(lives)) as group:
        told = group.outcomes(lambda rank: holdfast.load(store, into=lives[rank], **options))
    _assert_same_error(told, kind)
    return told


def _assert_same_error(outcomes: list[Any], kind: type[Exception]) -> None:
    for outcome in outcomes:
        if not isinstance(outcome, BaseException):
            pytest.fail(f"no error, but {outcome}")
        if type(outcome) is not kind:
            raise outcome
    assert (
        len({str(e).split("Look")[0] for e in outcomes}) == 1
        or kind is not holdfast.errors.PlanError
    )


def for_each_rank(size: int, make_state: Callable[[int], Any]) -> list[Any]:
    return [make_state(rank) for rank in range(size)]


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)
