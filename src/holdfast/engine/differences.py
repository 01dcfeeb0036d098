"""How a snapshot differs from the live state that it is to be loaded into, told at once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from holdfast.engine.meeting import Meeting
from holdfast.errors import (
    DTypeMismatch,
    MissingLeaf,
    PlanError,
    ShapeMismatch,
    UnexpectedLeaf,
)
from holdfast.format import tree

_SHOWN = 20
_SHOWN_BOTH = 5


@dataclass(slots=True)
class Differences:
    """``missing``: keys of the live state that the snapshot lacks; ``unexpected``: keys of the
    snapshot that the live state lacks; ``shapes``, ``dtypes`` and ``kinds``: both sides in words,
    by key. An error that is raised for them has the keys as fields: ``missing``, ``unexpected``,
    and ``misfits`` for the rest."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def agree(self, meeting: Meeting) -> None:
        """Leave as unexpected only what no rank expects: where stages hold different layers, what
        one lacks is another's."""
        told = meeting.gather(zlib.compress(msgspec.json.encode(sorted(self.unexpected))), bytes)
        common = b""
        if told is not None:
            several = [set(msgspec.json.decode(zlib.decompress(raw))) for raw in set(told)]
            common = zlib.compress(msgspec.json.encode(sorted(set.intersection(*several))))
        left = meeting.share(common if told is not None else None, bytes)
        kept = set(msgspec.json.decode(zlib.decompress(left)))
        self.unexpected[:] = [key for key in self.unexpected if key in kept]

    def raise_any(
        self, url: str, node: tree.Node, *, missing: bool = True, unexpected: bool = True
    ) -> None:
        """Raise one error that lists all differences, of the narrowest class that fits them.

        ``node``: the snapshot's tree; ``missing``, ``unexpected``: whether these are errors.
        """
        lacked, surplus = self.missing * missing, self.unexpected * unexpected
        misfits = [*self.shapes, *self.dtypes, *self.kinds]
        if not (lacked or surplus or misfits):
            return
        saved = [key for key, _ in tree.walk(node)]
        live = [*(set(saved) - set(self.unexpected)), *self.missing]
        kinds: list[tuple[type[PlanError], str, str]] = [
            (MissingLeaf, "missing in the snapshot", _listed(fold(lacked, saved))),
            (UnexpectedLeaf, "unexpected in the snapshot", _listed(fold(surplus, live))),
            (ShapeMismatch, "of another shape", _both(self.shapes)),
            (DTypeMismatch, "of another dtype or kind", _both(self.dtypes | self.kinds)),
        ]
        counts = (len(lacked), len(surplus), len(self.shapes), len(self.dtypes) + len(self.kinds))
        found = [(n, *kind) for n, kind in zip(counts, kinds, strict=True) if n]
        kind = found[0][1] if len(found) == 1 else PlanError
        ways = (
            ('missing="keep"', lacked),
            ('unexpected="ignore"', surplus),
            ("rename={...}", lacked and surplus),
            ("cast=True (of holdfast.load)", self.dtypes),
            ("keys=[...] without what does not fit and without its optimizer", misfits),
        )
        todo = ", ".join(way for way, needed in ways if needed)
        raise kind(
            f"The snapshot {url} does not fit the live state; nothing was changed. "
            + ". ".join(f"{n} {said}: {several}" for n, _, said, several in found),
            todo=f"Load into the same state as was saved, or ask for leniency by name: {todo}",
            missing=tuple(lacked),
            unexpected=tuple(surplus),
            misfits=tuple(misfits),
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


def _listed(several: Sequence[tuple[str, int]]) -> str:
    shown = [key if n == 1 else f"{key} ({n} leaves)" for key, n in several[:_SHOWN]]
    more = sum(n for _, n in several[_SHOWN:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _both(several: Mapping[str, str]) -> str:
    shown = [f"{key} {both}" for key, both in islice(several.items(), _SHOWN_BOTH)]
    more = len(several) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
