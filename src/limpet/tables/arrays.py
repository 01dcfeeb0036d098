"""Arrays that grow without a copy."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch

from limpet.errors import LimpetError

_NUMPY = {  # the NumPy dtype under which the memory of a torch dtype is seen
    torch.float32: np.float32,
    torch.bfloat16: np.int16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}
_HUGE = 64 << 20  # bytes of an array that asks for huge pages: random rows are read 1.5 x as fast


class GrowableArray:
    """A column of rows in private anonymous memory, which the kernel moves when it grows.

    New rows are zero, and use no memory until they are written. A tensor of ``view`` is an export
    of the memory: while one lives, ``reserve`` raises ``BufferError``. (torch.frombuffer would
    keep none, and its tensor would be left behind.)
    """

    def __init__(self, dtype: torch.dtype, width: int | None) -> None:
        self.dtype, self.width = dtype, width
        self.row_bytes = dtype.itemsize * (1 if width is None else width)
        self._capacity = max(1, mmap.PAGESIZE // self.row_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self._capacity * self.row_bytes, flags=flags)

    def view(self, rows: int) -> torch.Tensor:
        """Return the first rows, ``[rows, width]`` or ``[rows]``. Drop it before a growth."""
        width = 1 if self.width is None else self.width
        flat = np.frombuffer(self._memory, _NUMPY[self.dtype], rows * width)
        tensor = torch.from_numpy(flat).view(self.dtype)
        return tensor if self.width is None else tensor.view(rows, self.width)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows. Raises ``LimpetError`` if there is no memory."""
        if rows <= self._capacity:
            return
        # by a quarter: twice a large array may be more than the kernel allows
        rows = max(rows, self._capacity * 5 // 4)
        try:
            self._memory.resize(rows * self.row_bytes)
        except OSError as e:
            what = f"There is no memory for {rows:,} rows of a table"
            todo = "Use more servers, or limit the rows: evict=Evict(max_rows=...)"
            raise LimpetError(what, todo=todo) from e
        self._capacity = rows
        if rows * self.row_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
