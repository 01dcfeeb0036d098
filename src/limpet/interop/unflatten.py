"""The nesting of a state that torch.distributed.checkpoint (DCP) has flattened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from limpet.errors import FormatError
from limpet.format.tree import MAX_DEPTH

FormatErrorMaker = Callable[[str, object], FormatError]
"""Returns the error for invalid metadata, from what was expected and what was found."""

_FREE_FILLERS = 1 << 17
"""The list positions without a value that any folder may have."""


def unflatten(
    values: Mapping[str, Any], paths: Mapping[Any, Any], nbytes: int, error: FormatErrorMaker
) -> dict[Any, Any]:
    """Return the nested state.

    DCP flattens nested dicts and lists, and records the path of each value, with keys as text and
    list positions as integers. A name without a recorded path stays at the top level. ``nbytes``:
    the length of the metadata, which bounds the positions without a value. Raises ``FormatError``.
    """
    root = _ContainerBuilder()
    for fqn, value in values.items():
        path = paths.get(fqn, (fqn,))
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= MAX_DEPTH
            or not all(type(p) in (str, int) for p in path)
        ):
            raise error(f"the path of {fqn}", f"{path!r:.100}")
        level = root
        for name in path[:-1]:
            level = level.members.setdefault(name, _ContainerBuilder())
            if not isinstance(level, _ContainerBuilder):
                raise error(f"a dict or list at {path}", "a value")
        if level.members.setdefault(path[-1], value) is not value:
            raise error(f"one value at {path}", "two")
    state = _Nesting(_FREE_FILLERS + nbytes, error).build(root)
    if not isinstance(state, dict):
        raise error("a dict of values", type(state).__name__)
    return state


@dataclass(slots=True)
class _ContainerBuilder:
    """A dict or list whose members are being collected."""

    members: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Nesting:
    """Builds nested containers. ``fillers``: the list positions without a value that are left."""

    fillers: int
    error: FormatErrorMaker

    def build(self, builder: _ContainerBuilder) -> Any:
        values = {
            k: self.build(v) if isinstance(v, _ContainerBuilder) else v
            for k, v in builder.members.items()
        }
        positions = [k for k in values if type(k) is int]
        if not positions:
            return values
        self.fillers -= max(positions) + 1 - len(positions)
        if len(positions) < len(values) or min(positions) < 0 or self.fillers < 0:
            raise self.error("positions in a list", f"{list(values)[:5]!r:.100}")
        # DCP does not save members such as an empty dict; they become None
        return [values.get(i) for i in range(max(positions) + 1)]
