"""Loading what each rank keeps of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.engine.planning.select import ABSENT
from holdfast.engine.state.replication import PerRank, Replicated

if TYPE_CHECKING:
    from holdfast.engine.loading.binder import Binder
    from holdfast.engine.loading.targets import Settle


def bind_inside(
    binder: Binder, value: PerRank[Any] | Replicated[Any], node: Any, key: str
) -> Settle:
    """Bind what is wrapped; all in it is of the rank then, or of all of them."""
    before, binder.inside = binder.inside, True
    try:
        made = binder.bind(value.value, node, key)
    finally:
        binder.inside = before

    def settle() -> Any:
        value.value = made()
        return value

    return settle


def bind_per_rank(binder: Binder, value: Any, node: Any, key: str) -> Settle:
    """Each rank takes its own. One that the snapshot lacks keeps what it has, or, if the value can
    do that (``derive``), makes something of its own of rank 0's."""
    saved = {} if node is ABSENT else _by_rank(binder, node, key)
    if not saved:
        return binder.bind_stateful(value, ABSENT, key)

    def bind(child: Any, k: str) -> Settle:
        if isinstance(value, PerRank):
            return bind_inside(binder, value, child, k)
        return binder.bind_stateful(value, child, k)

    if not hasattr(value, "derive") and binder.wanted(node, key):
        binder.differences.own[key] = sorted(saved)
    if binder.rank in saved:
        return bind(*saved[binder.rank])
    if not hasattr(value, "derive"):
        return lambda: value
    made = bind(*saved[min(saved)])

    def settle() -> Any:
        made()
        value.derive(binder.rank)
        return value

    return settle


def _by_rank(binder: Binder, node: Any, key: str) -> dict[int, tuple[Any, str]]:
    """The nodes of the ranks, each with its key. What was saved before there were ranks is rank
    0's."""
    members = binder.members({}, node, key) or {}
    if members and all(type(name) is str and name.isdecimal() for name in members):
        return {int(name): member for name, member in members.items()}
    return {0: (node, key)} if members else {}
