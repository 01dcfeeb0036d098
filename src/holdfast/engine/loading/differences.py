"""How a snapshot differs from the live state that it is to be loaded into, told at once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.planning.select import KeyFilter
from holdfast.errors import DTypeMismatch, MissingLeaf, PlanError, ShapeMismatch, UnexpectedLeaf
from holdfast.format import tree
from holdfast.text import format_ranks

_MAX_SHOWN = 20
_MAX_MISMATCHES_SHOWN = 5
_MAX_SUGGESTED_KEYS = 5


@dataclass(slots=True)
class Differences:
    """``missing``: keys of the live state that the snapshot lacks; ``unexpected``: keys of the
    snapshot that the live state lacks; ``shapes``, ``dtypes`` and ``kinds``: both sides in words,
    by key; ``ranks``: those whose state it is, if not all. An error that is raised for them has the
    keys as fields: ``missing``, ``unexpected``, and ``misfits`` for the rest.

    ``own``: by the key of what each rank keeps of its own the ranks that saved it, and ``heirs``
    those that load it, where they are others: it is no error, but ``moved`` tells of it."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    saved_ranks: dict[str, list[int]] = field(default_factory=dict)
    loaded_ranks: dict[str, list[int]] = field(default_factory=dict)

    def combine_ranks(self, collective: Collective) -> None:
        """Make them those of all ranks, so that all raise the same or none does, before any reads.

        Unexpected is only what no rank expects: where stages hold different layers, what one lacks
        is another's. Missing and misfit is what is so on any rank; ``ranks`` are those."""
        if collective.size == 1:
            self._keep_reassigned([(self, [collective.rank])])
            return
        told = collective.gather(self._encode(), bytes)
        common = None if told is None else self._combine(told)
        left = msgspec.json.decode(
            zlib.decompress(collective.broadcast(common, bytes)), type=Differences
        )
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(left, name))

    def _encode(self) -> bytes:
        return zlib.compress(msgspec.json.encode(self))

    def _combine(self, encoded: Sequence[bytes]) -> bytes:
        made, expected = Differences(), list(self.unexpected)
        several = [
            (msgspec.json.decode(zlib.decompress(raw), type=Differences), ranks)
            for raw, ranks in _group_ranks(encoded).items()
        ]
        made._keep_reassigned(several)
        for one, ranks in several:
            surplus = set(one.unexpected)
            expected = [key for key in expected if key in surplus]
            known = set(made.missing)
            made.missing += [key for key in one.missing if key not in known]
            for name in ("shapes", "dtypes", "kinds"):
                sides = getattr(one, name)
                setattr(made, name, sides | getattr(made, name))
            if one.missing or one.shapes or one.dtypes or one.kinds:
                made.ranks += ranks
        made.unexpected = expected
        made.ranks = sorted(made.ranks) if len(made.ranks) < len(encoded) else []
        return made._encode()

    def _keep_reassigned(self, by_ranks: Sequence[tuple[Differences, list[int]]]) -> None:
        """Keep of what ranks have of their own that which other ranks have saved."""
        own: dict[str, list[int]] = {}
        heirs: dict[str, list[int]] = {}
        for one, ranks in by_ranks:
            own |= one.saved_ranks
            for key in one.saved_ranks:
                heirs[key] = sorted([*heirs.get(key, ()), *ranks])
        self.saved_ranks = {key: saved for key, saved in own.items() if saved != heirs[key]}
        self.loaded_ranks = {key: heirs[key] for key in self.saved_ranks}

    def describe_reassigned(self) -> str:
        """In words what ranks have of their own that others have saved; empty if there is none."""
        alike: dict[str, list[tuple[str, int]]] = {}
        for key, saved in self.saved_ranks.items():
            live = self.loaded_ranks[key]
            new, gone = sorted({*live} - {*saved}), sorted({*saved} - {*live})
            ends = (
                [f"{format_ranks(new)} keep{'s' * (len(new) == 1)} what was there"] if new else []
            )
            ends += [f"what {format_ranks(gone)} had is passed over"] if gone else []
            said = f"(saved by {len(saved)}, loaded by {len(live)}): {', '.join(ends)}"
            alike.setdefault(said, []).append((key, 1))
        return "; ".join(f"{_format_keys(keys)} {said}" for said, keys in alike.items())

    def raise_if_any(
        self,
        url: str,
        node: tree.Node,
        selected: KeyFilter,
        *,
        missing: bool = True,
        unexpected: bool = True,
    ) -> None:
        """Raise one error that lists all differences, of the narrowest class that fits them.

        ``node``: the snapshot's tree, of which what is ``selected`` is to be loaded; ``missing``,
        ``unexpected``: whether these are errors.
        """
        lacked, surplus = self.missing * missing, self.unexpected * unexpected
        misfits = [*self.shapes, *self.dtypes, *self.kinds]
        if not (lacked or surplus or misfits):
            return
        saved = [key for key, _ in tree.walk(node)]
        live = [*(set(saved) - set(self.unexpected)), *self.missing]
        kinds: list[tuple[type[PlanError], str, str]] = [
            (MissingLeaf, "missing in the snapshot", _format_keys(fold_keys(lacked, saved))),
            (UnexpectedLeaf, "unexpected in the snapshot", _format_keys(fold_keys(surplus, live))),
            (ShapeMismatch, "of another shape", _format_mismatches(self.shapes)),
            (
                DTypeMismatch,
                "of another dtype or kind",
                _format_mismatches(self.dtypes | self.kinds),
            ),
        ]
        counts = (len(lacked), len(surplus), len(self.shapes), len(self.dtypes) + len(self.kinds))
        found = [(n, *kind) for n, kind in zip(counts, kinds, strict=True) if n]
        kind = found[0][1] if len(found) == 1 else PlanError
        members = "" if lacked else _suggest_keys(filter(selected, saved), surplus)
        ways = (
            (f"keys={members}", members),
            ('missing="keep"', lacked),
            ('unexpected="ignore"', surplus),
            ("rename={...}", lacked and surplus),
            ("cast=True (of holdfast.load)", self.dtypes),
            ("keys=[...] without what does not fit and without its optimizer", misfits),
        )
        todo = ", ".join(way for way, needed in ways if needed)
        where = f" of {format_ranks(self.ranks)}" if self.ranks and (lacked or misfits) else ""
        raise kind(
            f"The snapshot {url} does not fit the live state{where}; nothing was changed. "
            + ". ".join(f"{n} {said}: {several}" for n, _, said, several in found),
            todo=f"Load into the same state as was saved, or ask for leniency by name: {todo}",
            missing=tuple(lacked),
            unexpected=tuple(surplus),
            misfits=tuple(misfits),
        )


def _group_ranks(encoded: Sequence[bytes]) -> dict[bytes, list[int]]:
    """Those who told the same."""
    found: dict[bytes, list[int]] = {}
    for rank, raw in enumerate(encoded):
        found.setdefault(raw, []).append(rank)
    return found


def fold_keys(keys: Sequence[str], present: Iterable[str]) -> list[tuple[str, int]]:
    """Keys that a side lacks, which has ``others``: in place of all below a level of which it has
    nothing that level, each with the number of leaves that it stands for."""
    there = {level for key in present for level in _key_prefixes(key)}
    below: dict[str, list[str]] = {}
    for key in keys:
        highest = next((level for level in _key_prefixes(key) if level not in there), key)
        below.setdefault(highest, []).append(key)
    return [(h if len(k) > 1 else k[0], len(k)) for h, k in below.items()]


def _suggest_keys(saved: Iterable[str], surplus: Sequence[str]) -> str:
    """What a load that passes over the surplus takes, each with all below it, as it asks for it;
    empty if that is nothing or much, or the surplus is a part of a model rather than a member."""
    unexpected = set(surplus)
    common = [key for key in saved if key not in unexpected] if surplus else []
    found, more = fold_keys(common, surplus), fold_keys(surplus, common)
    one, other = ({key.rpartition("/")[0] for key, n in s if n == 1} for s in (found, more))
    patterns = any(c in key for key, _ in found for c in "*?")
    if not 0 < len(found) <= _MAX_SUGGESTED_KEYS or patterns or (one & other) - {""}:
        return ""
    said = ", ".join(f'"{key}"' for key, _ in found)
    return said if len(found) == 1 else f"[{said}]"


def _key_prefixes(key: str) -> Iterator[str]:
    """``a``, ``a/b`` and ``a/b/c`` for ``a/b/c``."""
    end = key.find("/")
    while end >= 0:
        yield key[:end]
        end = key.find("/", end + 1)
    yield key


def _format_keys(folded: Sequence[tuple[str, int]]) -> str:
    shown = [key if n == 1 else f"{key} ({n} leaves)" for key, n in folded[:_MAX_SHOWN]]
    more = sum(n for _, n in folded[_MAX_SHOWN:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _format_mismatches(mismatches: Mapping[str, str]) -> str:
    shown = [f"{key} {both}" for key, both in islice(mismatches.items(), _MAX_MISMATCHES_SHOWN)]
    more = len(mismatches) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
