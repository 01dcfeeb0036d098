"""Stores with the option ``spread``, which only those of object stores have."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from limpet.format import names
from limpet.storage.store import Store, Traits
from limpet.testing.contract import keys


def spread_over(store: Store, count: int) -> Store:
    """Return a view of the store whose saves spread their shards over ``count`` folders."""
    kind = type(store)

    class SpreadStore(kind):  # type: ignore[misc, valid-type]
        @property
        def traits(self) -> Traits:
            traits: Traits = replace(super().traits, spread=count)
            return traits

    view = copy(store)
    view.__class__ = SpreadStore
    return view


def shards_in(store: Store) -> list[str]:
    """Return the keys of all shards and indexes."""
    return [key for key in keys(store) if names.parse_attempt(key.rpartition("/")[2]) is not None]
