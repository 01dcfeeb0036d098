"""Saves and loads of ranks that are threads, one call each."""

import pytest
import torch

import limpet
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup


def save_on_ranks(*states, store=None):
    """Save one of the ``states`` on each rank. Return the store."""
    store = MemoryStore() if store is None else store
    with FakeGroup(len(states)) as group:
        group.run(lambda rank: limpet.save(store, states[rank]))
    assert limpet.open(store).verify().ok
    return store


def save_error(kind, *states):
    """Return the error of a save that must fail on all ranks.

    Checks that all ranks raise an error of this class and that nothing is written.
    """
    store = MemoryStore()
    with FakeGroup(len(states)) as group:
        errors = group.outcomes(lambda rank: limpet.save(store, states[rank]))
    _assert_same_error(errors, kind)
    assert not list(store.list(""))
    assert not list(store.partials(""))
    return errors[0]


def load_on_ranks(store, *live_states, **options):
    """Load a snapshot into one live state on each rank."""
    with FakeGroup(len(live_states)) as group:
        group.run(lambda rank: limpet.load(store, into=live_states[rank], **options))


def load_errors(store, kind, *live_states, **options):
    """Return the errors of a load that must fail on all ranks with an error of this class."""
    with FakeGroup(len(live_states)) as group:
        errors = group.outcomes(lambda rank: limpet.load(store, into=live_states[rank], **options))
    _assert_same_error(errors, kind)
    return errors


def _assert_same_error(outcomes, kind):
    for outcome in outcomes:
        if not isinstance(outcome, BaseException):
            pytest.fail(f"expected an error, found {outcome}")
        if type(outcome) is not kind:
            raise outcome
    assert (
        len({str(e).split("Look")[0] for e in outcomes}) == 1 or kind is not limpet.errors.PlanError
    )


def for_each_rank(size, make_state):
    return [make_state(rank) for rank in range(size)]


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)
