"""The members of a state, also those in ``PerRank`` and ``Replicated``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from limpet.state.replication import PerRank, Replicated
from limpet.state.walk import find_named_instances


def find_members(state: Any, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the instances of ``kind`` in a state, each with its key."""
    yield from find_named_instances(state, kind, separator="/")
    wrappers: Any = (PerRank, Replicated)
    for key, wrapper in find_named_instances(state, wrappers, separator="/"):
        for inner, member in find_members(wrapper.value, kind):
            yield "/".join(filter(None, (key, inner))), member
