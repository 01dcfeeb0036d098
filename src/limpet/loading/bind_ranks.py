"""Load per-rank values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from limpet.layout.select import ABSENT
from limpet.loading.bind_stateful import bind_stateful
from limpet.loading.binding import STATE_INVALID, Binding
from limpet.loading.targets import Finalize
from limpet.state.modules import calling
from limpet.state.replication import PerRank, Replicated

Bind = Callable[[Any, Any, str], Finalize]


def bind_wrapped(
    binding: Binding, bind: Bind, value: PerRank[Any] | Replicated[Any], node: Any, key: str
) -> Finalize:
    """Bind the wrapped value. Values within a wrapper are not treated as per-rank again."""
    outer, binding.inside_wrapper = binding.inside_wrapper, True
    try:
        finalize_inner = bind(value.value, node, key)
    finally:
        binding.inside_wrapper = outer

    def finalize() -> Any:
        value.value = finalize_inner()
        return value

    return finalize


def bind_per_rank(binding: Binding, bind: Bind, value: Any, node: Any, key: str) -> Finalize:
    """Bind this rank's own saved value.

    If the snapshot has no value of this rank, the rank keeps its current value. If the value has a
    ``derive`` method, the rank instead loads the value of the lowest saved rank and derives its own
    value from it.
    """
    saved = _nodes_by_rank(binding, node, key)
    if not saved:
        return bind_stateful(binding, value, ABSENT, key)
    has_own, can_derive = binding.rank in saved, hasattr(value, "derive")
    if not can_derive and binding.is_any_selected(node, key):
        binding.differences.saved_ranks[key] = sorted(saved)
    if not has_own and not can_derive:
        return lambda: value
    child, child_key = saved[binding.rank if has_own else min(saved)]
    if isinstance(value, PerRank):
        finalize_child = bind_wrapped(binding, bind, value, child, child_key)
    else:
        finalize_child = bind_stateful(binding, value, child, child_key)

    def derive() -> Any:
        finalize_child()
        with calling(value, key, "derive", STATE_INVALID, live_state="not valid"):
            value.derive(binding.rank)
        return value

    return finalize_child if has_own else derive


def _nodes_by_rank(binding: Binding, node: Any, key: str) -> dict[int, tuple[Any, str]]:
    """Return the node of each rank, with its key. A value that was saved without ranks counts as
    the value of rank 0."""
    members = binding.dict_members({}, node, key) or {}
    if members and all(type(name) is str and name.isdecimal() for name in members):
        return {int(name): member for name, member in members.items()}
    return {0: (node, key)} if members else {}
