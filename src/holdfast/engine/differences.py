"""How a snapshot differs from the live state that it is to be loaded into, told at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.errors import (
    DTypeMismatch,
    MissingLeaf,
    PlanError,
    ShapeMismatch,
    UnexpectedLeaf,
)
from holdfast.format import tree

_SHOWN = 20


@dataclass(slots=True)
class Differences:
    """``missing``: keys of the live state that the snapshot lacks; ``unexpected``: keys of the
    snapshot that the live state lacks; ``shapes`` and ``dtypes``: leaves with both sides, in
    words."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def raise_any(
        self, url: str, node: tree.Node, *, missing: bool = True, unexpected: bool = True
    ) -> None:
        """Raise one error that lists all differences, of the narrowest class that fits them.

        ``node``: the snapshot's tree; ``missing``, ``unexpected``: whether these are errors.
        """
        lacked, surplus = self.missing * missing, self.unexpected * unexpected
        if not (lacked or surplus or self.shapes or self.dtypes):
            return
        saved = [key for key, _ in tree.walk(node)]
        live = [*(set(saved) - set(self.unexpected)), *self.missing]
        kinds: list[tuple[type[PlanError], str, list[tuple[str, int]]]] = [
            (MissingLeaf, "missing in the snapshot", fold(lacked, saved)),
            (UnexpectedLeaf, "unexpected in the snapshot", fold(surplus, live)),
            (ShapeMismatch, "of another shape", [(s, 1) for s in self.shapes]),
            (DTypeMismatch, "of another dtype or kind", [(s, 1) for s in self.dtypes]),
        ]
        found = [kind for kind in kinds if kind[2]]
        kind = found[0][0] if len(found) == 1 else PlanError
        raise kind(
            f"The snapshot {url} does not fit the live state; nothing was changed. "
            + ". ".join(_line(said, several) for _, said, several in found),
            todo="Load into the same state as was saved, or ask for leniency by name:"
            ' missing="keep", unexpected="ignore", cast=True, rename={...}, keys="..."',
            missing=tuple(lacked),
            unexpected=tuple(surplus),
        )


def fold(keys: Sequence[str], others: Iterable[str]) -> list[tuple[str, int]]:
    """Keys that a side lacks, which has ``others``: in place of all below a level of which it has
    nothing that level, each with the number of leaves that it stands for."""
    there = {level for key in others for level in _levels(key)}
    below: dict[str, list[str]] = {}
    for key in keys:
        highest = next((level for level in _levels(key) if level not in there), key)
        below.setdefault(highest, []).append(key)
    return [(h if len(k) > 1 else k[0], len(k)) for h, k in below.items()]


def _levels(key: str) -> Iterator[str]:
    """``a``, ``a/b`` and ``a/b/c`` for ``a/b/c``."""
    end = key.find("/")
    while end >= 0:
        yield key[:end]
        end = key.find("/", end + 1)
    yield key


def _line(said: str, several: Sequence[tuple[str, int]]) -> str:
    shown = [key if n == 1 else f"{key} ({n} leaves)" for key, n in several[:_SHOWN]]
    more = sum(n for _, n in several[_SHOWN:])
    listed = ", ".join(shown) + (f" and {more} more" if more else "")
    return f"{sum(n for _, n in several)} {said}: {listed}"
