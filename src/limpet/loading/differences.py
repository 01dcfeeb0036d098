"""The differences between a snapshot and the live state: all in one error, or in a report."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Literal

import msgspec

from limpet.arguments import require
from limpet.errors import DTypeMismatch, MissingLeaf, PlanError, ShapeMismatch, UnexpectedLeaf
from limpet.format import tree
from limpet.format.names import join_key, to_dotted
from limpet.layout.select import KeyFilter, make_key_filter, match_none
from limpet.ranks.collective import Collective
from limpet.snapshot.reader import SnapshotReader
from limpet.text import MAX_SHOWN, for_people, format_list, format_ranks, to_printable

_MAX_LISTED = 5

_TOLERABLE = {"missing": "keep", "unexpected": "ignore", "mismatched": "keep"}


@dataclass(frozen=True, slots=True)
class Leniency:
    """The differences that a load tolerates: none, unless the caller requests them by option."""

    missing: Literal["error", "keep"] | list[str] = "error"
    unexpected: Literal["error", "ignore"] | list[str] = "error"
    cast: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    mismatched: Literal["error", "keep"] | list[str] = "error"

    def __post_init__(self) -> None:
        for name, choice in _TOLERABLE.items():
            value = getattr(self, name)
            if isinstance(value, list | tuple) and all(isinstance(key, str) for key in value):
                object.__setattr__(self, name, [*value] or "error")
            else:
                is_valid = isinstance(value, str) and value in ("error", choice)
                hint = " (dtypes: cast=True)" if value == "cast" else ""
                expected = f'"error", "{choice}", or a list of patterns of keys{hint}'
                require(f"{name}=", is_valid, expected, value)
        expected = "True or False; the dtypes are those of the live tensors"
        require("cast=", type(self.cast) is bool, expected, self.cast)

    def tolerates(self, name: str) -> KeyFilter:
        """Return a function that returns True for a key that may be missing, and so on. The key of
        an object stands for all keys below it."""
        value = getattr(self, name)
        if value == "error":
            return match_none
        matches = make_key_filter(value if type(value) is list else None)
        return lambda key: matches(key) or matches(f"{key}/")


STRICT = Leniency()
"""No difference is tolerated."""


SLOT_OF = "slot of a parameter"
"""How the text about an optimizer's slot begins whose parameter has another shape."""


@dataclass(slots=True)
class Differences:
    """The differences between a snapshot and the live state into which it is loaded."""

    missing: list[str] = field(default_factory=list)  # the snapshot lacks them
    unexpected: list[str] = field(default_factory=list)  # the live state lacks them
    growing: list[str] = field(default_factory=list)  # unexpected, in dicts of plain values
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # they can be converted
    kinds: dict[str, str] = field(default_factory=dict)
    resized: dict[str, str] = field(default_factory=dict)  # shapes, also if not loaded; no slots
    casts: dict[str, str] = field(default_factory=dict)  # both dtypes of what is converted
    objects: list[str] = field(default_factory=list)  # that have missing or unexpected keys
    options: list[str] = field(default_factory=list)  # of live optimizers; no error
    ranks: list[int] = field(default_factory=list)  # whose states differ; empty: all
    saved_ranks: dict[str, list[int]] = field(default_factory=dict)  # of per-rank values
    reassigned: dict[str, str] = field(default_factory=dict)  # those that other ranks load

    def of_all_ranks(self, collective: Collective) -> Differences:
        """Return those of all ranks, before any reads, so that all raise one error. A key is
        unexpected only if no rank expects it: it may be of another pipeline stage."""
        if collective.size == 1:
            self._note_reassigned([(self, [collective.rank])])
            return self
        encoded = collective.gather(self._encode(), bytes)
        combined = None if encoded is None else self._combine(encoded)
        return _DIFFERENCES.decode(zlib.decompress(collective.broadcast(combined, bytes)))

    def _encode(self) -> bytes:
        return zlib.compress(msgspec.json.encode(self))

    def _combine(self, encoded: Sequence[bytes]) -> bytes:
        ranks_by_message: defaultdict[bytes, list[int]] = defaultdict(list)
        for rank, raw in enumerate(encoded):
            ranks_by_message[raw].append(rank)
        groups = [
            (_DIFFERENCES.decode(zlib.decompress(raw)), ranks)
            for raw, ranks in ranks_by_message.items()
        ]
        combined = Differences()
        combined._note_reassigned(groups)
        on_all_ranks = set(self.unexpected).intersection(*(one.unexpected for one, _ in groups))
        combined.unexpected = [key for key in self.unexpected if key in on_all_ranks]
        for name in ("missing", "growing", "objects", "options"):
            keys = dict.fromkeys(key for one, _ in groups for key in getattr(one, name))
            setattr(combined, name, list(keys))
        for one, ranks in groups:
            for name in ("shapes", "dtypes", "kinds", "resized", "casts"):
                setattr(combined, name, getattr(one, name) | getattr(combined, name))
            if one.missing or one.shapes or one.dtypes or one.kinds:
                combined.ranks += ranks
        combined.ranks = sorted(combined.ranks) if len(combined.ranks) < len(encoded) else []
        return combined._encode()

    def _note_reassigned(self, groups: Sequence[tuple[Differences, list[int]]]) -> None:
        """Record the per-rank values that are loaded by other ranks than saved them. ``groups``:
        the differences of all ranks, each with the ranks that have them."""
        saved_ranks: dict[str, list[int]] = {}
        loaded_ranks: defaultdict[str, list[int]] = defaultdict(list)
        for one, ranks in groups:
            saved_ranks |= one.saved_ranks
            for key in one.saved_ranks:
                loaded_ranks[key] = sorted([*loaded_ranks[key], *ranks])
        for key, saved in saved_ranks.items():
            if saved != (loaded := loaded_ranks[key]):
                text = f"(saved by {format_ranks(saved)}, loaded by {format_ranks(loaded)})"
                self.reassigned[key] = text

    def describe_reassigned(self) -> str:
        """Describe the per-rank values that are loaded by other ranks than saved them."""
        keys_by_text: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for key, text in self.reassigned.items():
            keys_by_text[text].append((key, 1))
        return "; ".join(f"{format_keys(keys)} {text}" for text, keys in keys_by_text.items())

    def raise_if_any(self, url: str, node: tree.Node, leniency: Leniency = STRICT) -> None:
        """Raise one error of the narrowest class that lists all differences, except those that
        ``leniency`` tolerates. ``node``: the snapshot's tree."""
        missing, unexpected, mismatched = map(leniency.tolerates, _TOLERABLE)
        lacking = [key for key in self.missing if not missing(key)]
        surplus = [key for key in self.unexpected if not unexpected(key)]
        # the slots of a parameter are kept with it
        kept = {to_dotted(key) for key in self.shapes if mismatched(key)}
        shapes = {
            key: text
            for key, text in self.shapes.items()
            if not mismatched(key)
            and (not text.startswith(SLOT_OF) or kept.isdisjoint(map(to_dotted, key.split("/"))))
        }
        others = self.dtypes | self.kinds
        if not (lacking or surplus or shapes or others):
            return
        # a parameter stands for its slots
        shapes = {k: t for k, t in shapes.items() if not t.startswith(SLOT_OF)} or shapes
        misfits = [*shapes, *others]
        saved = [key for key, _ in tree.walk(node)]
        live = [*(set(saved) - set(self.unexpected)), *self.missing]
        folded = fold_keys(lacking, saved), fold_keys(surplus, live)
        kinds: list[tuple[type[PlanError], Collection[str], str, str]] = [
            (MissingLeaf, lacking, "missing in the snapshot", format_keys(folded[0])),
            (UnexpectedLeaf, surplus, "unexpected in the snapshot", format_keys(folded[1])),
            (ShapeMismatch, shapes, "with a different shape", format_mismatches(shapes)),
            (DTypeMismatch, others, "with a different dtype or kind", format_mismatches(others)),
        ]
        present = [kind for kind in kinds if kind[1]]
        error_class = present[0][0] if len(present) == 1 else PlanError
        where = f" of {format_ranks(self.ranks)}" if self.ranks and (lacking or misfits) else ""
        listing = ". ".join(f"{len(found)} {text}: {keys}" for _, found, text, keys in present)
        advice = (
            ("rename={OLD: NEW}", self.missing and self.unexpected),
            ("keys=[...] without what does not fit", surplus or self.kinds),
            (_option('missing="keep"', missing, dict(folded[0])), lacking),
            (_option('unexpected="ignore"', unexpected, dict(folded[1])), surplus),
            ("check_state_dict(state) in a class whose keys change in training", self.objects),
            (_option('mismatched="keep"', mismatched, shapes), shapes),
            ('cast=True (in resume(), mismatched="cast")', self.dtypes),
        )
        options = ", ".join(option for option, helps in advice if helps)
        raise error_class(
            f"The snapshot {url} does not fit the live state{where}; nothing was changed."
            f" {listing}",
            todo=f"Load into the same state that was saved, or use options as needed: {options}",
            listing=listing,
            options=options,
            missing=tuple(lacking),
            unexpected=tuple(surplus),
            misfits=tuple(misfits),
            mismatched=tuple(shapes),
            dtypes=tuple(self.dtypes),
        )

    def report(
        self, snapshot: SnapshotReader, saved: Sequence[str], renames: Mapping[str, str]
    ) -> LoadReport:
        """Return the report of a load that tolerated these. ``saved``: the selected keys of the
        snapshot, after ``renames``."""
        shapes: dict[str, str] = {}
        for key, text in self.shapes.items():
            shapes[key] = text if text.startswith(SLOT_OF) else f"saved {text}"
        left_out = {*self.unexpected, *shapes}
        if left_out:  # a sparse tensor is kept as a whole, but saved in parts
            saved = [key for key in saved if left_out.isdisjoint(key_prefixes(key))]
        kept = dict.fromkeys((*self.missing, *self.options), MISSING) | shapes
        ignored = (*self.unexpected, *snapshot.left_out)
        return LoadReport(snapshot.url, tuple(saved), kept, ignored, self.casts, dict(renames))


def _option(option: str, tolerated: KeyFilter, keys: Iterable[str]) -> str:
    """Return the option that tolerates the differences of ``keys``: as patterns, if it has some."""
    if tolerated is match_none:
        return option
    patterns = format_list([f'"{to_printable(key)}"' for key in keys], MAX_SHOWN)
    return f"{option.partition('=')[0]}=[..., {patterns}]"


def fold_keys(keys: Sequence[str], present: Iterable[str]) -> list[tuple[str, int]]:
    """Return keys that one side lacks, with the number of leaves of each: a level below which
    ``present``, what it has, has no key replaces all keys below it."""
    present_levels = {level for key in present for level in key_prefixes(key)}
    below: dict[str, list[str]] = {}
    for key in keys:
        highest = next((level for level in key_prefixes(key) if level not in present_levels), key)
        below.setdefault(highest, []).append(key)
    return [(h if len(k) > 1 else k[0], len(k)) for h, k in below.items()]


def key_prefixes(key: str) -> Iterator[str]:
    """Return the key of each level: ``a``, ``a/b``, and ``a/b/c`` for ``a/b/c``."""
    return accumulate(key.split("/"), join_key)


_DIFFERENCES = msgspec.json.Decoder(Differences)


def format_keys(folded: Sequence[tuple[str, int]], limit: int = MAX_SHOWN) -> str:
    """Return keys or levels, each with the number of its leaves, as text."""
    shown = [to_printable(key) + f" ({n} leaves)" * (n > 1) for key, n in folded[:limit]]
    return format_list(shown, len(shown), total=len(shown) + sum(n for _, n in folded[limit:]))


def format_mismatches(mismatches: Mapping[str, str]) -> str:
    """Return the first keys as text, each with the description of both sides."""
    few = islice(mismatches.items(), _MAX_LISTED)
    shown = [to_printable(f"{key} {text}") for key, text in few]
    return format_list(shown, len(shown), total=len(mismatches))


def no_match_error(snapshot: SnapshotReader, keys: Any) -> MissingLeaf:
    """Return the error of a load whose ``keys`` select nothing."""
    return MissingLeaf(
        f"No leaf of {snapshot.url} matches",
        expected=f"keys like {format_list([keys] if isinstance(keys, str) else [*keys], 5)}",
        found=", ".join([*snapshot.nodes()][:10]),
        todo="`limpet show SNAPSHOT --keys '**'` prints the keys; * matches within a level, **"
        " across levels. rename={OLD: NEW} gives OLD the name NEW of the live state",
    )


# -- what a load tolerated -------------------------------------------------------------------------

MISSING = "missing in the snapshot"
"""Why a live value is kept that the snapshot lacks."""


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What a load into a live state did. As text, it has one line for each kind of difference.

    ``url``: the snapshot; ``loaded``: the keys of the leaves and plain values that were loaded;
    ``kept``: the keys of live values that were kept, each with the reason, also of the options of
    an optimizer that the snapshot lacks, unless they are off; ``ignored``: the keys of the snapshot
    that the live state lacks; ``cast``: the keys of the leaves that were converted, each with both
    dtypes; ``renamed``: the renames, as they were passed. Keys that ``keys=`` did not select are
    not listed. All ranks of a load have the same report.
    """

    url: str
    loaded: Sequence[str]
    kept: Mapping[str, str]
    ignored: Sequence[str]
    cast: Mapping[str, str]
    renamed: Mapping[str, str]

    @property
    def is_complete(self) -> bool:
        """True if no live value was kept and nothing in the snapshot was ignored."""
        return not (self.kept or self.ignored)

    @property
    def is_exact(self) -> bool:
        """True if nothing was kept, ignored, converted, or renamed."""
        return self.is_complete and not (self.cast or self.renamed)

    @property
    def summary(self) -> str:
        """The report as text; empty if nothing was kept, ignored, or converted."""
        return "" if self.is_complete and not self.cast else str(self)

    def __str__(self) -> str:
        missing = [key for key, reason in self.kept.items() if reason == MISSING]
        slots = [key for key, reason in self.kept.items() if reason.startswith(SLOT_OF)]
        shapes = {key: reason for key, reason in self.kept.items() if reason.startswith("saved")}
        renames = [f"{old} to {new}" for old, new in self.renamed.items()]
        others = {
            f"kept {len(shapes)} of another shape": format_mismatches(shapes),
            f"kept {len(slots)} slots of such parameters": self._format_folded(slots),
            f"kept {len(missing)} {MISSING}": self._format_folded(missing),
            f"ignored {len(self.ignored)} of the snapshot": self._format_folded(self.ignored),
            f"cast {len(self.cast)}": format_mismatches(self.cast),
            f"renamed {len(renames)}": format_list(renames, _MAX_LISTED),
        }
        lines = [f"{what}: {keys}" for what, keys in others.items() if keys]
        return "\n".join([f"loaded {len(self.loaded)} values of {for_people(self.url)}", *lines])

    def _format_folded(self, keys: Sequence[str]) -> str:
        return format_keys(fold_keys(keys, self.loaded)) if keys else ""

    __repr__ = __str__
