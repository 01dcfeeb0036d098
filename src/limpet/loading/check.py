"""The check at the first save of a structure: a load could bind the tree to the same live objects.

The encoder refuses what it knows that no load restores. This finds the rest before a training
relies on it: the tree is decoded as from a file, and bound without reading or allocating anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import msgspec

from limpet.errors import LimpetError, MemberFailed, Unsupported
from limpet.format.strict_json import StrictDecoder
from limpet.format.tree import check_tree, walk
from limpet.loading.binder import bind
from limpet.loading.binding import Binding
from limpet.loading.targets import LoadTargets
from limpet.state.arrays.own import Source
from limpet.state.flatten import FlatState

_JSON: StrictDecoder[Any] = StrictDecoder(msgspec.json.Decoder())
_encoder = msgspec.json.Encoder()

_MAX_CHECKED = 16
"""The number of structures that are known to be loadable. A training alternates between a few."""

_checked: tuple[int, ...] = ()


def check_once(
    state: dict[str, Any], flat: FlatState, rank: int, make_tree: Callable[[], Any]
) -> None:
    """Call ``check_loadable``, unless the same leaves of the same objects were checked before. A
    state that is too deep for this call stack is not checked: a load may begin in a shorter one."""
    global _checked
    leaves = flat.leaves
    if flat.streamed:  # of which each save has others
        leaves = [leaf for leaf in leaves if not leaf.key.startswith(flat.streamed)]
    # faster than a tuple for each leaf, because this runs at each save
    fields = (map(attrgetter(name), leaves) for name in ("key", "dtype", "shape"))
    structure = hash((*chain(*fields), *flat.states, *map(str, state)))
    if structure not in _checked:
        with suppress(RecursionError):
            check_loadable(state, flat, make_tree(), rank)
            _checked = (*_checked[1 - _MAX_CHECKED :], structure)


def check_loadable(state: dict[str, Any], flat: FlatState, tree: Any, rank: int) -> None:
    """Raise ``Unsupported`` if no load could restore the ``tree`` of a snapshot of this rank alone
    into the ``state`` that it was made from. No element is read, and no ``state_dict()`` called
    (but for objects whose ``check_state_dict()`` fails)."""
    sources = [leaf.key for leaf in flat.leaves if isinstance(leaf.source, Source)]
    if not all(key.startswith(flat.streamed) for key in sources):
        return  # a load gets arrays in their place
    try:
        tree = _JSON.decode(_encoder.encode(tree))
        nodes = {k: n for k, n in walk(tree) if type(n) is dict}
        leaves = check_tree(tree, "the manifest")
        encoded: Any = SimpleNamespace(leaves=leaves, nodes=lambda: nodes)  # all that a bind uses
        targets = LoadTargets(encoded, is_live=True, is_dry=True)
        binding = Binding(targets, lambda key: True, flat.names, rank, states=flat.states)
        bind(binding, state, tree, "")
        binding.differences.raise_if_any("of this state", tree)
    except (Unsupported, RecursionError, MemberFailed):
        raise
    except Exception as e:
        found = e.fields.get("listing", e.what) if isinstance(e, LimpetError) else repr(e)
        raise Unsupported(
            "No load could restore this state into the objects that it was made from",
            expected="a state that the same objects accept",
            found=found,
            todo="Change what the objects named here return from state_dict(), or leave them out of"
            " the state",
        ) from e
