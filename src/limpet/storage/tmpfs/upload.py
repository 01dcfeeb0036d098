"""Writes one file to a ``TmpfsStore``: into its memory, where a save can stage the bytes itself."""

from __future__ import annotations

import ctypes
import os

from limpet.buffers import address_of
from limpet.errors import StoreError
from limpet.storage.local.files import LocalFiles
from limpet.storage.local.upload import LocalUpload
from limpet.storage.store import Stat
from limpet.storage.tmpfs.mapped_file import MappedFile
from limpet.storage.tmpfs.spare_files import SUFFIX, SpareFiles


class TmpfsUpload(LocalUpload):
    """A mapped file without its final name. It implements ``storage.store.MappedUpload``.

    The file is a spare one, whose pages exist already, or a new one.
    """

    _suffix = SUFFIX
    _access = os.O_RDWR
    _file: MappedFile | None = None
    _is_committed = False

    def __init__(self, files: LocalFiles, spares: SpareFiles, key: str, length: int) -> None:
        self._spares = spares
        super().__init__(files, key, length, direct=False)

    def view(self, offset: int, length: int) -> memoryview:
        self._written.check(offset, length)
        with self._using_descriptors("map"):
            return self._open_file().buffer.view[offset : offset + length]

    def commit(self, *, accept_existing: bytes | None = None) -> Stat:
        file = self._file
        stat = super().commit(accept_existing=accept_existing)
        self._is_committed = True
        if file is not None:
            self._spares.add_committed(self._path, file)
        return stat

    def abort(self) -> None:
        super().abort()
        file, self._file = self._file, None
        if file is not None and not self._is_committed:
            file.close()  # not a spare file: another thread may be copying into it

    def _open_file(self) -> MappedFile:
        file = self._file
        if file is None:
            raise StoreError(
                f"The upload of {self._key} was aborted", key=self._key, store=self._files.url
            )
        return file

    def _create(self) -> int:
        def move(path: str) -> None:
            self._in_folder(lambda: self._fs.rename_noreplace(path, self._temp_path))

        self._file = self._spares.take(self._length, move)
        if self._file is None:
            self._file = MappedFile(super()._create(), self._spares.on_map)
        # The upload closes its descriptor when it ends. The file stays open, to become a spare one.
        return os.dup(self._file.fd)

    def _reserve(self, length: int) -> None:
        """Allocate the pages that a spare file lacks, or all pages of a new file."""
        fd = self._fd
        self._open_file().resize(length, lambda start, end: self._spares.allocate(fd, start, end))

    def _write(self, offset: int, data: memoryview) -> int:
        """Copy the data, unless it was staged here (see ``view``)."""
        buffer = self._open_file().buffer  # keeps the memory, also if another thread aborts
        source, target = address_of(data), buffer.address + offset
        if source != target:
            ctypes.memmove(target, source, len(data))
        return len(data)
