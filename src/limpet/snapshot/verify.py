"""Verification: checks the digest of every byte that a snapshot refers to, in all of its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from limpet.errors import DigestMismatch, FormatError, LimpetError, ManifestInvalid, StoreError
from limpet.format.index import ShardIndex
from limpet.format.manifest import Manifest, Shard
from limpet.format.names import MANIFEST
from limpet.format.safetensors import parse_header
from limpet.layout.read_plan import ReadItem, ReadRequest, chunk_read_items, make_read_plan
from limpet.layout.shard_layout import (
    full_shard_entries,
    leaf_boxes_from_index,
    own_spans,
    partial_shard_entries,
)
from limpet.snapshot.chunks import make_damage_error, merge_items, read_items
from limpet.snapshot.index_files import check_length, read_index
from limpet.snapshot.location import Location
from limpet.threads import Workers, gc_paused
from limpet.types import Box

CheckedChunks = dict[tuple[str, int, str], LimpetError | None]
"""The result of each chunk that was read: (file, offset, expected digest) to its error, or None."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a snapshot: the file, the offset in bytes, the leaves, and the error."""

    file: str
    offset: int | None
    leaves: tuple[str, ...]
    error: LimpetError


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``verify``: the number of bytes checked, the duration, and all problems."""

    url: str
    nbytes: int
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    location: Location,
    manifest: Manifest,
    leaves: Mapping[str, tuple[str, tuple[int, ...]]],
    get_indexes: Callable[[], Sequence[ShardIndex]],
    progress: Callable[[int], None] | None,
    checked_chunks: CheckedChunks | None,
) -> Report:
    """See ``SnapshotReader.verify``. ``get_indexes`` returns all indexes, checked, or raises."""
    checked_chunks = {} if checked_chunks is None else checked_chunks
    start = time.perf_counter()
    problems: list[Problem] = []
    checked: list[int] = []

    def advance(nbytes: int) -> None:
        checked.append(nbytes)
        if progress is not None:
            progress(nbytes)

    for shard in manifest.shards:
        _verify_shard(location, shard, problems, advance, checked_chunks)
    if not problems:
        try:
            # the plan of a load of all leaves finds missing elements
            requests = [ReadRequest(k, Box.whole(s)) for k, (_, s) in leaves.items()]
            gc_paused(make_read_plan)(get_indexes(), requests)
        except (FormatError, StoreError) as e:
            problems.append(_as_problem(e, location.key(MANIFEST)))
    problems.sort(key=lambda p: (p.file, p.offset or 0))
    return Report(location.url, sum(checked), time.perf_counter() - start, tuple(problems))


def _as_problem(error: LimpetError, file: str) -> Problem:
    fields = error.fields
    leaves = fields.get("leaves") or ((fields["leaf"],) if fields.get("leaf") else ())
    return Problem(fields.get("file") or file, fields.get("offset"), tuple(leaves), error)


def _verify_shard(
    location: Location,
    shard: Shard,
    problems: list[Problem],
    advance: Callable[[int], None],
    checked_chunks: CheckedChunks,
) -> None:
    """Add all problems of one shard, its index, and the files it refers to, to ``problems``."""
    file = location.file_key(shard.path)
    try:
        index = gc_paused(read_index)(location, shard)
        advance(shard.index.length)
        check_length(location, shard.path, shard.length)
    except (FormatError, StoreError) as e:
        problems.append(_as_problem(e, file))
        return
    unusable_paths = set()
    for referred in shard.refers:
        try:
            check_length(location, referred.path, referred.length)
        except (FormatError, StoreError) as e:
            problems.append(_as_problem(e, file))
            unusable_paths.add(referred.path)
    unread: list[int] = []
    for chunk in range(len(index.cuts)):
        if index.locate_chunk(chunk)[0] in unusable_paths:
            continue
        known = _identify(location, index, chunk)
        error = checked_chunks.get(known)
        if known not in checked_chunks:
            unread.append(chunk)
        elif isinstance(error, DigestMismatch):
            error = make_damage_error(location, index, chunk, str(error.found))
        if error is not None:
            problems.append(_as_problem(error, file))
    for chunk, error in _check_chunks(location, index, unread, advance).items():
        checked_chunks[_identify(location, index, chunk)] = error
        if error is not None:
            problems.append(_as_problem(error, file))
    if not any(p.file == file for p in problems):
        try:
            _compare_header_with_index(location, index)
        except (FormatError, StoreError) as e:
            problems.append(_as_problem(e, file))


def _identify(location: Location, index: ShardIndex, chunk: int) -> tuple[str, int, str]:
    path, offset = index.locate_chunk(chunk)
    return location.file_key(path), offset, index.chunk_digest(chunk)


def _check_chunks(
    location: Location, index: ShardIndex, chunks: Sequence[int], advance: Callable[[int], None]
) -> dict[int, LimpetError | None]:
    """Read chunks of a shard in several threads, and return the error of each, or None."""
    workers = Workers.create()
    checked: dict[int, LimpetError | None] = {}

    def check(group: Sequence[ReadItem]) -> None:
        error = None
        try:
            with read_items(location, index, group, workers) as verified:
                for _ in verified:
                    pass
        except (FormatError, StoreError) as e:
            parts = group if len(group) > 1 else _split_by_chunk(group[0], index)
            if len(parts) > 1:  # find every damaged chunk
                for part in parts:
                    check([part])
                return
            error = e
        for item in group:
            checked.update(dict.fromkeys(range(item.first_chunk, item.end_chunk), error))
            advance(item.stop - item.start)

    items = chunk_read_items(0, index.cuts, index.chunk_refs, np.array(chunks, np.int64))
    workers.each(merge_items(location, [index], items, workers), check)
    return checked


def _split_by_chunk(item: ReadItem, index: ShardIndex) -> list[ReadItem]:
    """Return one read item for each chunk of an item."""
    cuts = [item.start, *index.cuts[item.first_chunk : item.end_chunk].tolist()]
    return [
        replace(item, first_chunk=chunk, end_chunk=chunk + 1, start=start, stop=stop)
        for chunk, (start, stop) in enumerate(pairwise(cuts), item.first_chunk)
    ]


@gc_paused
def _compare_header_with_index(location: Location, index: ShardIndex) -> None:
    """Check that the safetensors header, which other programs read, and the index list the same
    tensors. Raises ``FormatError`` or ``StoreError``."""
    file = location.file_key(index.path)
    raw = bytearray(index.header)
    location.store.get_range(file, 0, index.header, memoryview(raw))
    data_start, entries = parse_header(bytes(raw), index.length, file)
    in_header = [(e.name.rstrip("~"), e.dtype, e.shape, data_start + e.start) for e in entries]
    leaf_boxes, image_offsets = leaf_boxes_from_index(index)
    rows = (
        full_shard_entries(leaf_boxes)
        if index.chunk_refs is None
        else partial_shard_entries(leaf_boxes, image_offsets, own_spans(index))
    )
    in_index = [
        (name.rstrip("~"), dtype, shape, data_start + offset)
        for name, dtype, shape, offset, _ in rows
    ]
    if sorted(in_header, key=repr) != sorted(in_index, key=repr):
        raise ManifestInvalid(
            f"The header and the index of {file} contradict each other",
            expected="the same tensors in both",
            found=f"{len(in_header)} in the header, {len(in_index)} in the index",
            file=file,
            offset=0,
        )
