"""The options of one group of parameters, as they are after a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from limpet.format import tree
from limpet.loading.binding import Binding

_INDEPENDENT_OF_SLOTS = frozenset(
    {"lr", "weight_decay", "eps", "maximize", "foreach", "fused", "capturable", "differentiable"}
)
"""Options that do not decide which slots an optimizer has."""


@dataclass(frozen=True, slots=True)
class LoadedOptions:
    """The options of a group after a load.

    ``values``: the saved ones where they are loaded, else the live ones; ``change_slots``: whether
    an option is loaded that may decide which slots the optimizer has, and of which shape and dtype.
    Then, the saved slots are those that fit.
    """

    values: Mapping[str, Any]
    change_slots: bool

    @classmethod
    def of(cls, binding: Binding, group: Mapping[str, Any], node: Any, key: str) -> Self:
        """Return the options of a live group into which the node of a saved group is loaded."""
        loaded = {
            name: child
            for name, child, k in (() if node is None else tree.children(node, key))
            # a plain value is its own node
            if name in group and type(child) is not dict and binding.selected(k)
        }
        change_slots = any(
            _may_change_slots(name, value, group[name]) for name, value in loaded.items()
        )
        return cls({**group, **loaded}, change_slots)


def _may_change_slots(name: str, saved: Any, live: Any) -> bool:
    """Return True if this option may decide which slots exist. Most such options are switches, as
    ``amsgrad``, or are off at zero, as ``momentum``; some are sizes, such as a rank."""
    if name in _INDEPENDENT_OF_SLOTS or name.startswith("initial_"):
        return False
    return bool(saved) != bool(live) or (type(saved) in (int, str) and saved != live)
