"""Stores with the option ``spread``, which only those of object stores have."""

from copy import copy
from dataclasses import replace

from limpet.format import names
from limpet.storage.store import Traits
from limpet.testing.contract import keys


def spread_over(store, count):
    """Return a view of the store whose saves spread their shards over ``count`` folders."""
    kind = type(store)

    class SpreadStore(kind):
        @property
        def traits(self):
            traits: Traits = replace(super().traits, spread=count)
            return traits

    view = copy(store)
    view.__class__ = SpreadStore
    return view


def shards_in(store):
    """Return the keys of all shards and indexes."""
    return [key for key in keys(store) if names.parse_attempt(key.rpartition("/")[2]) is not None]
