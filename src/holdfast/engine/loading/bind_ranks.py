"""Loading what each rank keeps of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.engine.loading.binding import Binding
from holdfast.engine.loading.targets import Finalize
from holdfast.engine.planning.select import ABSENT
from holdfast.engine.state.replication import PerRank, Replicated

Bind = Callable[[Any, Any, str], Finalize]


def bind_wrapped(
    binding: Binding, bind: Bind, value: PerRank[Any] | Replicated[Any], node: Any, key: str
) -> Finalize:
    """Bind what is wrapped; all in it is of the rank then, or of all of them."""
    before, binding.inside_wrapper = binding.inside_wrapper, True
    try:
        made = bind(value.value, node, key)
    finally:
        binding.inside_wrapper = before

    def settle() -> Any:
        value.value = made()
        return value

    return settle


def bind_per_rank(binding: Binding, bind: Bind, value: Any, node: Any, key: str) -> Finalize:
    """Each rank takes its own. One that the snapshot lacks keeps what it has, or, if the value can
    do that (``derive``), makes something of its own of rank 0's."""
    saved = {} if node is ABSENT else _nodes_by_rank(binding, node, key)
    if not saved:
        return binding.bind_stateful(value, ABSENT, key)

    def bind_node(child: Any, k: str) -> Finalize:
        if isinstance(value, PerRank):
            return bind_wrapped(binding, bind, value, child, k)
        return binding.bind_stateful(value, child, k)

    if not hasattr(value, "derive") and binding.is_any_selected(node, key):
        binding.differences.saved_ranks[key] = sorted(saved)
    if binding.rank in saved:
        return bind_node(*saved[binding.rank])
    if not hasattr(value, "derive"):
        return lambda: value
    made = bind_node(*saved[min(saved)])

    def settle() -> Any:
        made()
        value.derive(binding.rank)
        return value

    return settle


def _nodes_by_rank(binding: Binding, node: Any, key: str) -> dict[int, tuple[Any, str]]:
    """The nodes of the ranks, each with its key. What was saved before there were ranks is rank
    0's."""
    members = binding.dict_members({}, node, key) or {}
    if members and all(type(name) is str and name.isdecimal() for name in members):
        return {int(name): member for name, member in members.items()}
    return {0: (node, key)} if members else {}
