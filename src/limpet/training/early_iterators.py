"""Iterators of torchdata's loaders that were created before a resume.

Such a loader applies a loaded state only when ``iter`` is called the next time. An earlier iterator
goes on as if nothing had been loaded, although ``state_dict()`` returns the loaded position.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

from limpet.state.walk import find_named_instances

_CLASSES = {"torchdata.stateful_dataloader": "StatefulDataLoader", "torchdata.nodes": "Loader"}

_ITERATORS = "_iterator", "_it"

_UNUSED = "next_iter_state", "_next_iter_state_dict", "_initial_iter_for_state_dict"
"""The attributes that are true while no iterator has begun at the loaded position."""


class EarlyIterators:
    """The iterators that the loaders in a state have before a resume."""

    def __init__(self, state: Any = ()) -> None:
        modules = ((sys.modules.get(name), kind) for name, kind in _CLASSES.items())
        kinds: Any = tuple(getattr(module, kind) for module, kind in modules if module is not None)
        self._found = [
            (path, loader, ref(iterator))
            for path, loader in (find_named_instances(state, kinds, separator="/") if kinds else ())
            for iterator in (vars(loader).get(name) for name in _ITERATORS)
            if iterator is not None
        ]

    def find_stale(self) -> list[str]:
        """Return the paths of the loaders whose loaded position no iterator uses, while an earlier
        iterator is alive. Later calls return no others."""
        self._found = [
            (path, loader, iterator)
            for path, loader, iterator in self._found
            if iterator() is not None and any(getattr(loader, name, None) for name in _UNUSED)
        ]
        return [path for path, *_ in self._found]
