"""A store in memory that outlives the process: files in a folder on tmpfs, such as ``/dev/shm``.

The files are those of a ``LocalStore``, which can read them. What differs is how they are written:
an upload is memory (``put_mapped``), so that a save stages into the file itself, and the state is
not in memory twice. Nothing survives the end of the machine or of its container.

To copy 1 GiB by 2 threads took 44 ms into a spare file, which is also what a copy into other warm
memory takes, and 190 ms into a new file, after 250 ms to allocate it (2 cores, Linux 6.18). If the
file system was mounted with ``huge=within_size``, a new file is as fast as a spare one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from limpet.buffers import Buffer
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.store import Traits, Upload
from limpet.storage.tmpfs.spare_files import SUFFIX, SpareFiles
from limpet.storage.tmpfs.upload import TmpfsUpload
from limpet.threads import no_op
from limpet.types import ALIGNMENT

if sys.platform != "win32":
    import fcntl


class TmpfsStore(LocalStore):
    """A store in the folder ``root`` on tmpfs, which the first write creates.

    ``spare_files``: how many files of deleted objects are kept for the next uploads. A process
    keeps only files that it wrote and deleted itself: if another process deletes them, their memory
    is released at the next upload. ``on_map``: called with the memory of each file when it is
    mapped, for example to page-lock it.
    """

    space_advice = (
        "See what else is in this file system (df -h, ls -la); other programs may have left files"
        " there. Or give it more memory"
    )

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        spare_files: int = 1,
        on_map: Callable[[Buffer], object] = no_op,
        fs: Fs | None = None,
    ) -> None:
        super().__init__(root, fs=fs, direct=False)
        self._spares = SpareFiles(self._root, self.fs, spare_files, on_map)

    @property
    def traits(self) -> Traits:
        return Traits(name="tmpfs", alignment=ALIGNMENT, durable=False, in_memory=True)

    @property
    def spare_bytes(self) -> int:
        """The size of the spare files, in bytes."""
        return self._spares.spare_bytes

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        return self.put_mapped(key, length)

    def put_mapped(self, key: str, length: int) -> TmpfsUpload:
        """Begin to write an object into memory. All its pages are allocated when this returns.

        Raises ``NoSpace`` if the file system is full.
        """
        return TmpfsUpload(self, self._spares, key, length)

    def delete(self, key: str) -> None:
        path = self.path(key, to_change=True)
        is_recycled = False
        with suppress(OSError):  # then the file is deleted as any other one
            is_recycled = self._spares.recycle(path)
        if is_recycled:
            self.remove_empty_folders(os.path.dirname(path))
        else:
            super().delete(key)

    def preallocate(self, length: int) -> None:
        """Create a spare file for an upload of about ``length`` bytes, unless there are enough.

        This takes half a second per GiB, so a background thread calls it. Raises ``NoSpace``.
        """
        with self.translate_errors("allocate", "a spare file", writing=True):
            self.make_folders(self._root)
            self._spares.preallocate(length)

    def remove_leftovers(self) -> int:
        """Delete the unfinished uploads and spare files of processes that have ended.

        Returns their size in bytes. Those of other processes that run stay.
        """
        removed = 0
        for stat in self.partials(""):
            if stat.key.endswith(SUFFIX) and stat.length and self._is_abandoned(stat.key):
                super().delete(stat.key)
                removed += stat.length
        return removed

    def release_memory(self) -> None:
        """Delete the spare files, and keep no more. The objects stay."""
        self._spares.release()

    def _is_abandoned(self, key: str) -> bool:
        """Return True if no process has a mapped file locked. Only an empty one is not locked."""
        with suppress(OSError):
            fd = self.fs.open(self.path(key), os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            finally:
                self.fs.close(fd)
        return False
