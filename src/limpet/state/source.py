"""Where the bytes of a leaf come from if they are not in the memory of this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

from limpet.types import DTYPES


class Source(ABC):
    """A tensor in a state whose bytes are read when they are saved: from a file or from a server.

    ``dtype``: its name in ``limpet.types.DTYPES``; ``shape``: of the whole tensor. A save reads
    ranges in several threads, in any order, and some of them twice. The bytes must not change
    meanwhile.
    """

    dtype: str
    shape: tuple[int, ...]

    is_cpu, is_cuda = True, False

    @abstractmethod
    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the row-major bytes of the tensor from byte ``start``."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def is_contiguous(self) -> bool:
        """Return False: there is no address of the elements."""
        return False

    def rows(self, first: int, count: int) -> Source:
        """Return the part with ``count`` rows from ``first``, of the first dimension that has
        several."""
        d = next(d for d, n in enumerate(self.shape) if n > 1)
        begin = first * (self.nbytes // self.shape[d])
        return _Part(self, begin, (*self.shape[:d], count, *self.shape[d + 1 :]))


class _Part(Source):
    """A part of a source that begins at byte ``begin``."""

    def __init__(self, whole: Source, begin: int, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = whole.dtype, shape
        self._whole, self._begin = whole, begin

    def read_into(self, start: int, view: memoryview) -> None:
        self._whole.read_into(self._begin + start, view)
