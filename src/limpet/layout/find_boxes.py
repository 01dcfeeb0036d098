"""Find the stored boxes that overlap requested boxes, in one pass over the indexes of all shards.

Arithmetic only: this module does no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from limpet.errors import ManifestInvalid, MissingLeaf, PlanError
from limpet.format.index import ShardIndex
from limpet.format.index_columns import LeafSchema
from limpet.layout.cover_boxes import ShardCopies
from limpet.ragged import Ints, exclusive_cumsum, flatten_rows, int_array, ranges, row_products
from limpet.text import MAX_SHOWN, format_list
from limpet.types import Box

DAMAGED_ADVICE = (
    "Load another version; this one is damaged or was written by a faulty version of Limpet"
)


@dataclass(frozen=True, slots=True, eq=False)
class _RequestColumns:
    """The requests for the leaves of a shard, as columns with one row per request.

    ``leaf``: leaf number in the shard; ``itemsize``: bytes per element; ``dims``: number of
    dimensions. The offsets and sizes of the requested box are the ``dims`` entries of ``offsets``
    and ``sizes`` from index ``begins`` on.
    """

    leaf: Ints
    request_id: Ints
    itemsize: Ints
    dims: Ints
    begins: Ints
    offsets: Ints
    sizes: Ints


class OverlapSearch:
    """Search all shards, each once, for stored boxes that overlap requested boxes.

    ``exact_matches``: flags the requests that equal one stored box; this is the common case and
    needs no geometry. ``overlaps``: for each other request, the stored boxes that overlap it, each
    as shard, file offset, itemsize, offsets, sizes. ``leaf_types``: dtype and shape of each
    requested leaf, from the first shard that has it.
    """

    def __init__(self, requests: Sequence[tuple[str, Box]]) -> None:
        self.requests = requests
        self.exact_matches = np.zeros(len(requests), bool)
        self.overlaps: dict[int, array[int]] = {}
        self.leaf_types: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._columns_by_schema: dict[LeafSchema, _RequestColumns] = {}
        self._requests_by_key: dict[str, list[int]] = {}
        for number, (key, _) in enumerate(requests):
            self._requests_by_key.setdefault(key, []).append(number)

    def scan_shard(
        self, shard_number: int, shard_index: ShardIndex, shard_copies: ShardCopies
    ) -> bool:
        """Record the boxes of a shard that overlap requests, and return True if there are any.

        Adds a copy to ``shard_copies`` for each request that a box of this shard matches exactly.
        No Python loop visits boxes that are not requested: a rank requests few of the boxes that
        all ranks saved.
        """
        columns = shard_index.leaves
        requested = self._columns_by_schema.get(columns.schema)
        if requested is None:
            requested = self._columns_by_schema[columns.schema] = self._request_columns(
                columns.schema, shard_index.shard
            )
        counts = columns.box_counts[requested.leaf]
        pair = np.repeat(np.arange(len(counts)), counts)
        box = ranges(exclusive_cumsum(columns.box_counts)[requested.leaf], counts)
        unmatched = ~self.exact_matches[requested.request_id[pair]]
        pair, box = pair[unmatched], box[unmatched]
        dims, begins = requested.dims[pair], columns.dim_starts[box]
        stored, wanted = ranges(begins, dims), ranges(requested.begins[pair], dims)
        o, n = columns.offsets[stored], columns.sizes[stored]
        z, m = requested.offsets[wanted], requested.sizes[wanted]
        equal = row_products((o == z) & (n == m), dims)
        hits = np.flatnonzero(equal | row_products((o < z + m) & (z < o + n), dims))
        if not len(hits):
            return False
        pair, box, begins, dims, equal = (c[hits] for c in (pair, box, begins, dims, equal))
        request, at, size = (
            requested.request_id[pair],
            columns.file_offsets[box],
            requested.itemsize[pair],
        )
        stored = ranges(begins, dims)
        offsets, sizes = columns.offsets[stored], columns.sizes[stored]
        if equal.any():
            # If several boxes match a request, use the first.
            _, first = np.unique(request[equal], return_index=True)
            linear = (request, at, np.zeros_like(at), columns.numels[box] * size)
            copies = np.column_stack([c[equal][first] for c in linear])
            shard_copies.linear.frombytes(copies.tobytes())
            self.exact_matches[request[equal]] = True
        if not equal.all():
            o, n, stop = offsets.tolist(), sizes.tolist(), 0
            rows = (request, at, size, dims, self.exact_matches[request])
            for r, a, s, count, matched in zip(*(row.tolist() for row in rows), strict=True):
                start, stop = stop, stop + count
                if not matched:
                    known = self.overlaps.setdefault(r, array("q"))
                    known.extend((shard_number, a, s, *o[start:stop], *n[start:stop]))
        return True

    def _check_type(self, key: str, leaf_type: tuple[str, tuple[int, ...]], file: str) -> None:
        known_type = self.leaf_types.setdefault(key, leaf_type)
        if known_type != leaf_type:
            raise ManifestInvalid(
                f"Shards disagree about {key}",
                expected=f"{known_type[0]} {list(known_type[1])}",
                found=f"{leaf_type[0]} {list(leaf_type[1])} in {file}",
                todo=DAMAGED_ADVICE,
                file=file,
                leaf=key,
            )

    def _request_columns(self, schema: LeafSchema, file: str) -> _RequestColumns:
        """Return the requests for the leaves of a schema.

        Raises ``ManifestInvalid`` if an earlier shard gives a leaf another dtype or shape.
        """
        leaves, request_ids = [], []
        # a read of one leaf of many looks only at that leaf
        for leaf in sorted(
            schema.numbers[key] for key in self._requests_by_key.keys() & schema.numbers.keys()
        ):
            key = schema.keys[leaf]
            matching = self._requests_by_key[key]
            self._check_type(key, (schema.dtypes[leaf], schema.shapes[leaf]), file)
            leaves += [leaf] * len(matching)
            request_ids += matching
        try:
            return self._build_columns(schema, leaves, request_ids)
        except (OverflowError, ValueError):  # ``check_requests`` reports boxes outside their leaf
            boxes = [self.requests[n][1] for n in request_ids]
            inside = [
                b.is_within(schema.shapes[leaf]) for b, leaf in zip(boxes, leaves, strict=True)
            ]
            return self._build_columns(
                schema, [*compress(leaves, inside)], [*compress(request_ids, inside)]
            )

    def _build_columns(
        self, schema: LeafSchema, leaves: list[int], request_ids: list[int]
    ) -> _RequestColumns:
        """Build the columns of these requests; ``leaves[i]`` is the leaf of ``request_ids[i]``.

        Raises ``ValueError`` for a box whose number of dimensions differs from that of its leaf,
        and ``OverflowError`` for a number beyond 64 bits.
        """
        leaf, request_id = int_array(leaves), int_array(request_ids)
        dims = schema.ndims[leaf]
        offsets = [self.requests[n][1].offsets for n in request_ids]
        sizes = [self.requests[n][1].sizes for n in request_ids]
        if not [*map(len, offsets)] == [*map(len, sizes)] == dims.tolist():
            raise ValueError
        begins, itemsize = exclusive_cumsum(dims), schema.itemsizes[leaf]
        return _RequestColumns(
            leaf, request_id, itemsize, dims, begins, flatten_rows(offsets), flatten_rows(sizes)
        )

    def pop_overlaps(self, request_id: int) -> Ints:
        """Return the stored boxes that overlap a request, one per row, and forget them."""
        dims = len(self.requests[request_id][1].sizes)
        return np.array(self.overlaps.pop(request_id, ()), np.int64).reshape(-1, 3 + 2 * dims)

    def check_requests(self) -> None:
        """Raise an error for requests that no scanned shard can fill.

        Raises ``MissingLeaf`` if no shard has a requested leaf, and ``PlanError`` if a requested
        box is not within its leaf.
        """
        missing = sorted(self._requests_by_key.keys() - self.leaf_types.keys())
        if missing:
            raise MissingLeaf(
                f"The snapshot lacks {len(missing)} of the requested leaves",
                expected=format_list(missing, MAX_SHOWN),
                found="none of their boxes in any shard",
                todo="Do not request these leaves, or load a version that has them",
                leaves=tuple(missing),
            )
        for (key, box), matched in zip(self.requests, self.exact_matches.tolist(), strict=True):
            shape = self.leaf_types[key][1]
            if not matched and not box.is_within(shape):
                raise PlanError(
                    f"The requested part of {key} is not within the stored tensor",
                    expected=f"a part of a tensor of shape {list(shape)}",
                    found=f"offsets {box.offsets}, sizes {box.sizes}",
                    todo="Request a part within the stored shape",
                    key=key,
                )
