"""Write the files of an export under temporary names in pieces, and then give them their names.

Memory use is that of ``stream_leaves``, and does not depend on the size of the
snapshot.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from limpet.errors import AlreadyExists, NotFound, StoreError
from limpet.exporting.output_layout import INDEX_FILE, SINGLE_FILE, OutputFile
from limpet.exporting.plan import ExportPlan
from limpet.exporting.stream import stream_leaves
from limpet.format.names import parse_version
from limpet.format.torchzip import combine_crc32
from limpet.interop.export_record import insert_crc
from limpet.interop.mmap_files import Advance
from limpet.run.run import Run
from limpet.snapshot.location import Location, is_snapshot, versions_in
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Upload
from limpet.threads import no_op
from limpet.types import MIB

SEGMENT = 64 * MIB
"""How many bytes of a file are exported before the next ones, to a store that uploads parts or only
appends. The leaves come in the order in which a shard has them, and a leaf with a checksum comes
before its header. This bounds the bytes that wait for those in front of them."""


def write_export(
    snapshot: SnapshotReader,
    plan: ExportPlan,
    location: Location,
    advance: Advance = no_op,
) -> None:
    """Write the files into the folder ``location``. If this function raises, none of them remains.

    ``advance(nbytes)`` is called from several threads as bytes of tensors are written. Raises
    ``AlreadyExists``, ``FormatError`` if the snapshot is damaged, and ``StoreError``.
    """
    refuse_existing(location, plan)
    written: list[str] = []
    crcs: dict[str, int] = {}
    try:
        with snapshot.pin_while_reading():
            for file in plan.files:
                if file.build_text is None:
                    crcs[file.name] = _FileWriter(snapshot, file, location, advance).write()
                else:
                    text = file.build_text(crcs)
                    _write_text(text, file.name, location)
                    crcs[file.name] = zlib.crc32(text)
                written.append(location.key(file.name))
    except BaseException:
        for key in written:
            with suppress(StoreError):  # report the first error
                location.store.delete(key)
        raise


def _write_text(text: bytes, name: str, location: Location) -> None:
    with location.store.put(location.key(name), len(text)) as upload:
        upload.write_at(0, memoryview(text))
        upload.commit()


def refuse_existing(location: Location, plan: ExportPlan) -> None:
    """Raise ``AlreadyExists`` before anything is written."""
    # of a version that is saved later, retention deletes the whole folder
    is_in_run = parse_version(location.folder) and Run(location.store).listing().has_version()
    if is_in_run or is_snapshot(location) or versions_in(location):
        raise AlreadyExists(
            f"{location.url} is a snapshot, a version, or a run; nothing was exported into it",
            todo="Export to another folder",
            key=location.folder,
            store=location.store.url,
        )
    names = {file.name for file in plan.files}
    if plan.kind in (
        "hf",
        "transformers",
        "accelerate",
    ):  # readers would use these instead of the new files
        names |= {SINGLE_FILE, INDEX_FILE}
    for name in sorted(names):
        with suppress(NotFound):
            location.store.stat(location.key(name))
            raise AlreadyExists(
                f"There is already a file {name} in {location.url}; nothing was changed",
                todo="Export to another folder, or delete that file first",
                key=location.key(name),
                store=location.store.url,
            )


class _Part(NamedTuple):
    """A part of a file, or of a leaf, with the offset in it."""

    offset: int
    length: int
    crc: int


def _combine(parts: Sequence[_Part]) -> int:
    """Return the CRC-32 of parts without gaps."""
    return combine_crc32((part.length, part.crc) for part in sorted(parts))


class _FileWriter:
    """Writes one file, in ascending order as far as possible.

    A store that uploads parts keeps incomplete parts in memory, and a store that can only append
    keeps everything that comes too early. If the header of a file has the CRC-32 of the file, an
    export to a store that only appends reads the leaves twice: the first time for the CRC-32.
    """

    def __init__(
        self, snapshot: SnapshotReader, file: OutputFile, location: Location, advance: Advance
    ) -> None:
        self._snapshot, self._file, self._advance = snapshot, file, advance
        self._location = location
        self._parts: list[_Part] = []

    def write(self) -> int:
        """Write the file and return its CRC-32; 0 if nothing records it."""
        file, store = self._file, self._location.store
        with store.put(self._location.key(file.name), file.length) as upload:
            if file.crc_at is None:
                self._write_pieces(upload, file.pieces)
                self._write_leaves(upload)
            else:
                ((at, header),) = file.pieces
                self._count(at, header)
                self._write_leaves(None if store.traits.ordered else upload)
                sealed = insert_crc(header, file.crc_at, _combine(self._parts))
                upload.write_at(at, memoryview(sealed))
                if store.traits.ordered:
                    self._write_leaves(upload)
            upload.commit()
        has_checksum = file.crc_at is not None or file.build_leaf_header is not None
        return _combine(self._parts) if has_checksum else 0

    def _count(self, at: int, data: bytes | memoryview) -> None:
        self._parts.append(_Part(at, len(data), zlib.crc32(data)))

    def _write_pieces(self, upload: Upload | None, pieces: Sequence[tuple[int, bytes]]) -> None:
        for at, raw in pieces:
            if self._file.build_leaf_header is not None:
                self._count(at, raw)
            if upload is not None:
                upload.write_at(at, memoryview(raw))

    def _write_leaves(self, upload: Upload | None) -> None:
        """Write the leaves, or only compute their checksums if there is no ``upload``."""
        file, store = self._file, self._location.store
        checksums = [0] * len(file.keys)
        counts = file.build_leaf_header is not None or file.crc_at is not None
        counts = counts and not (upload is not None and store.traits.ordered and file.crc_at)
        is_split = store.traits.part_size or store.traits.ordered
        for numbers in _split_by_offset(file, SEGMENT if is_split else file.length):
            crcs: dict[int, list[_Part]] = {n: [] for n in numbers}

            def write(i: int, at: int, data: memoryview) -> None:
                n = numbers[i]  # noqa: B023  (called before the next iteration)
                if upload is not None:
                    upload.write_at(file.offsets[n] + at, data)
                    self._advance(len(data))
                if counts:
                    crcs[n].append(_Part(at, len(data), zlib.crc32(data)))  # noqa: B023

            stream_leaves(self._snapshot, [file.keys[n] for n in numbers], write)
            if not counts:
                continue
            for n in numbers:
                checksums[n] = _combine(crcs[n])
                length = sum(part.length for part in crcs[n])
                self._parts.append(_Part(file.offsets[n], length, checksums[n]))
                if file.build_leaf_header is not None:
                    self._write_pieces(upload, [file.build_leaf_header(n, checksums[n])])
        if file.build_directory is not None:
            self._write_pieces(upload, [file.build_directory(checksums)])


def _split_by_offset(file: OutputFile, nbytes: int) -> Iterator[list[int]]:
    """Yield the numbers of the leaves in the order of their offsets, in groups that lie within
    ``nbytes`` bytes of the file. A larger leaf is a group of its own: in a group, the leaves that
    are assembled come last, so one in front of it would keep all of it waiting."""
    in_order = sorted(range(len(file.keys)), key=file.offsets.__getitem__)
    ends = [file.offsets[n] for n in in_order[1:]] + [file.length]
    start = 0
    while start < len(in_order):
        end = file.offsets[in_order[start]] + nbytes
        stop = start + 1
        while stop < len(in_order) and ends[stop] <= end:
            stop += 1
        yield in_order[start:stop]
        start = stop
