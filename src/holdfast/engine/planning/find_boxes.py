"""Which stored boxes touch wanted ones: one pass over the indexes of all shards.

Arithmetic only: nothing here does I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from holdfast.engine.planning.cover_boxes import Needs
from holdfast.errors import ManifestInvalid, MissingLeaf, PlanError
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import Kinds
from holdfast.ragged import Ints, before, flat, numbers, products, within
from holdfast.types import Box

SHOWN = 20
"""Most leaves that one error message names."""

REFUSED = "Load another version; this one is damaged or was not written by a correct Holdfast"


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What is wanted of the leaves of a shard, as columns: number of the leaf, number of the want,
    bytes of an element; of the wanted box ``dims`` offsets and sizes, from ``begins`` on."""

    leaf: Ints
    want: Ints
    width: Ints
    dims: Ints
    begins: Ints
    offsets: Ints
    sizes: Ints


class Search:
    """Goes through the shards, once, for boxes that are wanted.

    ``done``: wants that a stored box fills exactly, as is usual: no geometry; ``found``: for the
    others the stored boxes that touch them, each as its shard, where it begins there, bytes of an
    element, offsets and sizes; ``types``: of the leaves, as the first shard has it.
    """

    def __init__(self, wanted: Sequence[tuple[str, Box]]) -> None:
        self.wanted = wanted
        self.done = np.zeros(len(wanted), bool)
        self.found: dict[int, array[int]] = {}
        self.types: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._asked: dict[Kinds, _Asked] = {}
        self._by_key: dict[str, list[int]] = {}
        for number, (key, _) in enumerate(wanted):
            self._by_key.setdefault(key, []).append(number)

    def look(self, number: int, shard: ShardIndex, need: Needs) -> bool:
        """Note what the shard has; in ``need`` what fills a want. Whether there was anything.

        No loop goes over boxes that nobody wants: a rank wants few of those that all have saved.
        """
        columns = shard.leaves
        asked = self._asked.get(columns.kinds)
        if asked is None:
            asked = self._asked[columns.kinds] = self._ask(columns.kinds, shard.shard)
        counts = columns.counts[asked.leaf]
        pair = np.repeat(np.arange(len(counts)), counts)
        box = within(before(columns.counts)[asked.leaf], counts)
        left = ~self.done[asked.want[pair]]
        pair, box = pair[left], box[left]
        dims, begins = asked.dims[pair], columns.begins[box]
        ours, theirs = within(begins, dims), within(asked.begins[pair], dims)
        o, n = columns.offsets[ours], columns.sizes[ours]
        z, m = asked.offsets[theirs], asked.sizes[theirs]
        same = products((o == z) & (n == m), dims)
        hits = np.flatnonzero(same | products((o < z + m) & (z < o + n), dims))
        if not len(hits):
            return False
        pair, box, begins, dims, same = (c[hits] for c in (pair, box, begins, dims, same))
        want, at, width = asked.want[pair], columns.at[box], asked.width[pair]
        part = within(begins, dims)
        offsets, sizes = columns.offsets[part], columns.sizes[part]
        if same.any():
            # of several that are the same, the first
            _, first = np.unique(want[same], return_index=True)
            exact = (want, at, np.zeros_like(at), columns.elements[box] * width)
            copies = np.column_stack([c[same][first] for c in exact])
            need.linear.frombytes(copies.tobytes())
            self.done[want[same]] = True
        if not same.all():
            o, n, stop = offsets.tolist(), sizes.tolist(), 0
            rows = (want, at, width, dims, self.done[want])
            for w, a, size, count, done in zip(*(r.tolist() for r in rows), strict=True):
                start, stop = stop, stop + count
                if not done:
                    known = self.found.setdefault(w, array("q"))
                    known.extend((number, a, size, *o[start:stop], *n[start:stop]))
        return True

    def _same_type(self, key: str, kind: tuple[str, tuple[int, ...]], file: str) -> None:
        known = self.types.setdefault(key, kind)
        if known != kind:
            raise _two_types(key, known, kind, file)

    def _ask(self, kinds: Kinds, file: str) -> _Asked:
        """What is wanted of these leaves. Raises ``ManifestInvalid``."""
        leaves, wants = [], []
        for leaf, key in enumerate(kinds.keys):
            several = self._by_key.get(key)
            if several is not None:
                kind = kinds.dtypes[leaf], kinds.shapes[leaf]
                self._same_type(key, kind, file)
                leaves += [leaf] * len(several)
                wants += several
        try:
            return self._columns(kinds, leaves, wants)
        except (OverflowError, ValueError):  # what is outside its leaf is refused by ``check``
            boxes = [self.wanted[n][1] for n in wants]
            inside = [b.inside(kinds.shapes[leaf]) for b, leaf in zip(boxes, leaves, strict=True)]
            return self._columns(kinds, [*compress(leaves, inside)], [*compress(wants, inside)])

    def _columns(self, kinds: Kinds, leaves: list[int], wants: list[int]) -> _Asked:
        """Raises ``ValueError`` for a box of other dimensions than its leaf, ``OverflowError``."""
        leaf, want = numbers(leaves), numbers(wants)
        dims = kinds.dims[leaf]
        offsets = [self.wanted[n][1].offsets for n in wants]
        sizes = [self.wanted[n][1].sizes for n in wants]
        if not [*map(len, offsets)] == [*map(len, sizes)] == dims.tolist():
            raise ValueError
        begins, width = before(dims), kinds.widths[leaf]
        return _Asked(leaf, want, width, dims, begins, flat(offsets), flat(sizes))

    def touching(self, number: int) -> Ints:
        """A row for each of the boxes that were found for a want; they are kept no longer."""
        dims = len(self.wanted[number][1].sizes)
        return np.array(self.found.pop(number, ()), np.int64).reshape(-1, 3 + 2 * dims)

    def check(self) -> None:
        """Raise for wants of leaves that were not seen, or of what is not within its leaf."""
        missing = sorted(self._by_key.keys() - self.types.keys())
        if missing:
            raise MissingLeaf(
                f"The snapshot lacks {len(missing)} leaves that are wanted",
                expected=some(missing),
                found="none of their boxes in any shard",
                todo="Leave them out, or load a version that has them",
                leaves=tuple(missing),
            )
        for (key, box), done in zip(self.wanted, self.done.tolist(), strict=True):
            shape = self.types[key][1]
            if not done and not box.inside(shape):
                raise PlanError(
                    f"A part of {key} is wanted that is not within the tensor",
                    expected=f"a part of {list(shape)}",
                    found=f"offsets {box.offsets}, sizes {box.sizes}",
                    todo="Ask for a part within the stored shape",
                    key=key,
                )


def _two_types(
    key: str, known: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]], file: str
) -> ManifestInvalid:
    return ManifestInvalid(
        f"Shards disagree about {key}",
        expected=f"{known[0]} {list(known[1])}",
        found=f"{other[0]} {list(other[1])} in {file}",
        todo=REFUSED,
        file=file,
        leaf=key,
    )


def some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
