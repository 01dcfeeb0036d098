"""Which stored boxes touch wanted ones: one pass over the indexes of all shards.

Arithmetic only: nothing here does I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from holdfast.engine.planning.cover_boxes import ShardCopies
from holdfast.errors import ManifestInvalid, MissingLeaf, PlanError
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import LeafSchema
from holdfast.ragged import Ints, exclusive_cumsum, flatten_rows, int_array, ranges, row_products
from holdfast.types import Box

MAX_SHOWN = 20
"""Most leaves that one error message names."""

DAMAGED_ADVICE = (
    "Load another version; this one is damaged or was not written by a correct Holdfast"
)


@dataclass(frozen=True, slots=True, eq=False)
class _RequestColumns:
    """What is wanted of the leaves of a shard, as columns: number of the leaf, number of the want,
    bytes of an element; of the wanted box ``dims`` offsets and sizes, from ``begins`` on."""

    leaf: Ints
    request_id: Ints
    itemsize: Ints
    dims: Ints
    begins: Ints
    offsets: Ints
    sizes: Ints


class OverlapSearch:
    """Goes through the shards, once, for boxes that are wanted.

    ``done``: wants that a stored box fills exactly, as is usual: no geometry; ``found``: for the
    others the stored boxes that touch them, each as its shard, where it begins there, bytes of an
    element, offsets and sizes; ``types``: of the leaves, as the first shard has it.
    """

    def __init__(self, requests: Sequence[tuple[str, Box]]) -> None:
        self.requests = requests
        self.exact_matches = np.zeros(len(requests), bool)
        self.overlaps: dict[int, array[int]] = {}
        self.leaf_types: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._columns_by_kinds: dict[LeafSchema, _RequestColumns] = {}
        self._requests_by_key: dict[str, list[int]] = {}
        for number, (key, _) in enumerate(requests):
            self._requests_by_key.setdefault(key, []).append(number)

    def scan_shard(
        self, shard_number: int, shard_index: ShardIndex, shard_copies: ShardCopies
    ) -> bool:
        """Note what the shard has; in ``need`` what fills a want. Whether there was anything.

        No loop goes over boxes that nobody wants: a rank wants few of those that all have saved.
        """
        columns = shard_index.leaves
        asked = self._columns_by_kinds.get(columns.schema)
        if asked is None:
            asked = self._columns_by_kinds[columns.schema] = self._request_columns(
                columns.schema, shard_index.shard
            )
        counts = columns.box_counts[asked.leaf]
        pair = np.repeat(np.arange(len(counts)), counts)
        box = ranges(exclusive_cumsum(columns.box_counts)[asked.leaf], counts)
        left = ~self.exact_matches[asked.request_id[pair]]
        pair, box = pair[left], box[left]
        dims, begins = asked.dims[pair], columns.dim_starts[box]
        ours, theirs = ranges(begins, dims), ranges(asked.begins[pair], dims)
        o, n = columns.offsets[ours], columns.sizes[ours]
        z, m = asked.offsets[theirs], asked.sizes[theirs]
        same = row_products((o == z) & (n == m), dims)
        hits = np.flatnonzero(same | row_products((o < z + m) & (z < o + n), dims))
        if not len(hits):
            return False
        pair, box, begins, dims, same = (c[hits] for c in (pair, box, begins, dims, same))
        want, at, width = asked.request_id[pair], columns.file_offsets[box], asked.itemsize[pair]
        part = ranges(begins, dims)
        offsets, sizes = columns.offsets[part], columns.sizes[part]
        if same.any():
            # of several that are the same, the first
            _, first = np.unique(want[same], return_index=True)
            exact = (want, at, np.zeros_like(at), columns.numels[box] * width)
            copies = np.column_stack([c[same][first] for c in exact])
            shard_copies.linear.frombytes(copies.tobytes())
            self.exact_matches[want[same]] = True
        if not same.all():
            o, n, stop = offsets.tolist(), sizes.tolist(), 0
            rows = (want, at, width, dims, self.exact_matches[want])
            for w, a, size, count, done in zip(*(r.tolist() for r in rows), strict=True):
                start, stop = stop, stop + count
                if not done:
                    known = self.overlaps.setdefault(w, array("q"))
                    known.extend((shard_number, a, size, *o[start:stop], *n[start:stop]))
        return True

    def _check_type(self, key: str, leaf_type: tuple[str, tuple[int, ...]], file: str) -> None:
        known = self.leaf_types.setdefault(key, leaf_type)
        if known != leaf_type:
            raise _type_conflict(key, known, leaf_type, file)

    def _request_columns(self, kinds: LeafSchema, file: str) -> _RequestColumns:
        """What is wanted of these leaves. Raises ``ManifestInvalid``."""
        leaves, wants = [], []
        for leaf, key in enumerate(kinds.keys):
            several = self._requests_by_key.get(key)
            if several is not None:
                kind = kinds.dtypes[leaf], kinds.shapes[leaf]
                self._check_type(key, kind, file)
                leaves += [leaf] * len(several)
                wants += several
        try:
            return self._build_columns(kinds, leaves, wants)
        except (OverflowError, ValueError):  # what is outside its leaf is refused by ``check``
            boxes = [self.requests[n][1] for n in wants]
            inside = [
                b.is_within(kinds.shapes[leaf]) for b, leaf in zip(boxes, leaves, strict=True)
            ]
            return self._build_columns(
                kinds, [*compress(leaves, inside)], [*compress(wants, inside)]
            )

    def _build_columns(
        self, kinds: LeafSchema, leaves: list[int], request_ids: list[int]
    ) -> _RequestColumns:
        """Raises ``ValueError`` for a box of other dimensions than its leaf, ``OverflowError``."""
        leaf, want = int_array(leaves), int_array(request_ids)
        dims = kinds.ndims[leaf]
        offsets = [self.requests[n][1].offsets for n in request_ids]
        sizes = [self.requests[n][1].sizes for n in request_ids]
        if not [*map(len, offsets)] == [*map(len, sizes)] == dims.tolist():
            raise ValueError
        begins, width = exclusive_cumsum(dims), kinds.itemsizes[leaf]
        return _RequestColumns(
            leaf, want, width, dims, begins, flatten_rows(offsets), flatten_rows(sizes)
        )

    def pop_overlaps(self, request_id: int) -> Ints:
        """A row for each of the boxes that were found for a want; they are kept no longer."""
        dims = len(self.requests[request_id][1].sizes)
        return np.array(self.overlaps.pop(request_id, ()), np.int64).reshape(-1, 3 + 2 * dims)

    def check_requests(self) -> None:
        """Raise for wants of leaves that were not seen, or of what is not within its leaf."""
        missing = sorted(self._requests_by_key.keys() - self.leaf_types.keys())
        if missing:
            raise MissingLeaf(
                f"The snapshot lacks {len(missing)} leaves that are wanted",
                expected=summarize_names(missing),
                found="none of their boxes in any shard",
                todo="Leave them out, or load a version that has them",
                leaves=tuple(missing),
            )
        for (key, box), done in zip(self.requests, self.exact_matches.tolist(), strict=True):
            shape = self.leaf_types[key][1]
            if not done and not box.is_within(shape):
                raise PlanError(
                    f"A part of {key} is wanted that is not within the tensor",
                    expected=f"a part of {list(shape)}",
                    found=f"offsets {box.offsets}, sizes {box.sizes}",
                    todo="Ask for a part within the stored shape",
                    key=key,
                )


def _type_conflict(
    key: str, expected: tuple[str, tuple[int, ...]], found: tuple[str, tuple[int, ...]], file: str
) -> ManifestInvalid:
    return ManifestInvalid(
        f"Shards disagree about {key}",
        expected=f"{expected[0]} {list(expected[1])}",
        found=f"{found[0]} {list(found[1])} in {file}",
        todo=DAMAGED_ADVICE,
        file=file,
        leaf=key,
    )


def summarize_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
