"""Verification: every byte of every file of a snapshot read, and compared with its digest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from holdfast.buffers import shared_pool
from holdfast.engine.planning.read_plan import (
    ReadItem,
    ReadRequest,
    chunk_read_items,
    make_read_plan,
)
from holdfast.engine.planning.shard_layout import (
    full_shard_entries,
    leaf_boxes_from_index,
    own_spans,
    partial_shard_entries,
)
from holdfast.engine.snapshot.index_files import check_length, file_key, read_index
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.read import make_damage_error, read_verified_chunks
from holdfast.errors import DigestMismatch, FormatError, HoldfastError, ManifestInvalid, StoreError
from holdfast.format.index import ShardIndex
from holdfast.format.manifest import Manifest, Shard
from holdfast.format.names import MANIFEST
from holdfast.format.safetensors import header_length, parse_header
from holdfast.settings import read_settings
from holdfast.threads import in_parallel
from holdfast.types import Box

CheckedChunks = dict[tuple[str, int, str], HoldfastError | None]
"""Chunks that were read: file, offset, and digest expected there; and what was wrong."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a snapshot: file, offset in bytes, leaves, and the error."""

    file: str
    offset: int | None
    leaves: tuple[str, ...]
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Report:
    """What ``verify`` found: bytes that were checked, seconds it took, and every problem."""

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
    """See ``Snapshot.verify``. ``indexes`` reads and checks all of them, or raises."""
    checked_chunks = {} if checked_chunks is None else checked_chunks
    began = time.perf_counter()
    problems: list[Problem] = []
    done: list[int] = []

    def tell(nbytes: int) -> None:
        done.append(nbytes)
        if progress is not None:
            progress(nbytes)

    for shard in manifest.shards:
        _verify_shard(location, shard, problems, tell, checked_chunks)
    if not problems:
        try:
            # every leaf whole, by the same plan that a load makes
            wants = [ReadRequest(k, Box.whole(s)) for k, (_, s) in leaves.items()]
            make_read_plan(get_indexes(), wants)
        except (FormatError, StoreError) as e:
            problems.append(_as_problem(e, location.key(MANIFEST)))
    problems.sort(key=lambda p: (p.file, p.offset or 0))
    return Report(location.url, sum(done), time.perf_counter() - began, tuple(problems))


def _as_problem(error: HoldfastError, file: str) -> Problem:
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
    """Add to ``problems`` all that is wrong with one shard, its index, and what it refers to."""
    file = location.key(shard.name)
    try:
        index = read_index(location, shard)
        advance(shard.index.length)
        check_length(location, shard.name, shard.length)
    except (FormatError, StoreError) as e:
        problems.append(_as_problem(e, file))
        return
    lost = set()
    for referred in shard.refers:
        try:
            check_length(location, referred.path, referred.length)
        except (FormatError, StoreError) as e:
            problems.append(_as_problem(e, file))
            lost.add(referred.path)
    pool = shared_pool()

    def check(item: ReadItem) -> None:
        path, at = index.locate_chunk(item.first_chunk)
        if path in lost:
            return
        known = (file_key(location, path), at, index.chunk_digest(item.first_chunk))
        error = checked_chunks.get(known)
        if known not in checked_chunks:
            try:
                with read_verified_chunks(location, index, item, pool):
                    pass
            except (FormatError, StoreError) as e:
                error = e
            checked_chunks[known] = error
            advance(item.stop - item.start)
        elif isinstance(error, DigestMismatch):
            error = make_damage_error(location, index, item.first_chunk, str(error.found))
        if error is not None:
            problems.append(_as_problem(error, file))

    # one chunk an item, so that every damaged one is named
    items = [
        i
        for part in chunk_read_items(0, index.cuts, index.chunk_refs)
        for i in _split_by_chunk(part, index)
    ]
    in_parallel(items, check, min(read_settings().threads, len(items)))
    if not any(p.file == file for p in problems):
        try:
            _check_header(location, index)
        except (FormatError, StoreError) as e:
            problems.append(_as_problem(e, file))


def _split_by_chunk(item: ReadItem, index: ShardIndex) -> list[ReadItem]:
    cuts = [item.start, *index.cuts[item.first_chunk : item.end_chunk].tolist()]
    return [
        replace(
            item,
            first_chunk=item.first_chunk + i,
            end_chunk=item.first_chunk + i + 1,
            start=a,
            stop=b,
        )
        for i, (a, b) in enumerate(pairwise(cuts))
    ]


def _check_header(location: Location, index: ShardIndex) -> None:
    """The safetensors header must say the same as the index, for those who read it alone."""
    file = location.key(index.shard)
    raw = bytearray(index.header)
    location.store.get_range(file, 0, index.header, memoryview(raw))
    header_length(bytes(raw[:8]), index.length, file)
    begin, entries = parse_header(bytes(raw), index.length, file)
    told = [(e.name.rstrip("~"), e.dtype, e.shape, begin + e.start) for e in entries]
    holdings, begins = leaf_boxes_from_index(index)
    rows = (
        full_shard_entries(holdings)
        if index.chunk_refs is None
        else partial_shard_entries(holdings, begins, own_spans(index))
    )
    boxes = [(name.rstrip("~"), dtype, shape, begin + at) for name, dtype, shape, at, _ in rows]
    if sorted(told, key=repr) != sorted(boxes, key=repr):
        raise ManifestInvalid(
            f"{file}: its header and its index contradict each other",
            expected="the same tensors in both",
            found=f"{len(told)} in the header, {len(boxes)} in the index",
            file=file,
            offset=0,
        )
