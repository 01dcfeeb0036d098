"""The package's own kinds of arrays: a ``Source`` of streamed bytes, and arrays in given boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from limpet.state import sharding
from limpet.state.arrays import ArrayLibrary, LocalBoxes, part_library
from limpet.state.copy_pool import CopyPool
from limpet.state.sharding import Boxed
from limpet.types import DTYPES, Box


class Source(ABC):
    """A tensor in a state whose bytes are read when they are saved: from a file or from a server.

    ``dtype``: its name in ``limpet.types.DTYPES``; ``shape``: of the whole tensor. A save reads
    ranges in several threads, in any order, some of them twice. They must not change meanwhile.
    ``is_held``: not until the save ends. An asynchronous save then copies nothing when it begins.
    It has chunks of its own, so that later versions can refer to it.
    ``carried``: a version has the same elements: its digest, the key, and their offsets in the
    leaf. A save that refers to it need not read them.
    """

    is_held = False
    carried: tuple[str, str, tuple[int, ...]] | None = None
    dtype: str
    shape: tuple[int, ...]

    @abstractmethod
    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the row-major bytes of the tensor from byte ``start``."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> Source:
        """Return the rows that the last slice selects. The dimensions before it have one row."""
        d = len(index) - 1
        first, stop, _ = index[d].indices(self.shape[d])
        begin = first * (self.nbytes // self.shape[d])
        part = _Part(self, begin, (*self.shape[:d], stop - first, *self.shape[d + 1 :]))
        if self.carried is not None:
            digest, key, at = self.carried
            part.carried = digest, key, (*at[:d], at[d] + first, *at[d + 1 :])
        return part


class _Part(Source):
    """A part of a source that begins at byte ``begin``."""

    def __init__(self, whole: Source, begin: int, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self.is_held = whole.dtype, shape, whole.is_held
        self._whole, self._begin = whole, begin

    def read_into(self, start: int, view: memoryview) -> None:
        self._whole.read_into(self._begin + start, view)


def library_of(cls: type) -> ArrayLibrary | None:
    if issubclass(cls, Source):
        return _SOURCES
    if issubclass(cls, LocalBoxes):
        return _IMPORTED
    return _BOXES if issubclass(cls, Boxed) else None


class _Boxes(ArrayLibrary):
    """Each ``Boxed`` is an array of another library, in a given box."""

    def describe(self, value: Boxed) -> tuple[str, str]:
        return part_library(type(value.tensor)).describe(value.tensor)

    def local_boxes(self, value: Boxed, key: str) -> LocalBoxes:
        return sharding.boxes_of_boxed(value, key)

    def boxes_to_save(self, value: Boxed, key: str) -> LocalBoxes | None:
        return sharding.resolve_parts(self.local_boxes(value, key))

    def target(self, value: Boxed, part: Any, key: str) -> Any:
        return part_library(type(part)).target(part, part, key)

    def loaded(self, value: Boxed, targets: Sequence[tuple[Box, Any]]) -> Boxed:
        if not value.box.numel:
            return value
        tensor = part_library(type(value.tensor)).loaded(value.tensor, targets)
        return value if tensor is value.tensor else replace(value, tensor=tensor)

    def can_cast(self, stored: str, value: Boxed) -> bool:
        return part_library(type(value.tensor)).can_cast(stored, value.tensor)

    def copy(self, value: Boxed, pool: CopyPool) -> Boxed:
        tensor = part_library(type(value.tensor)).copy(value.tensor, pool)
        return value if tensor is value.tensor else replace(value, tensor=tensor)


class _Imported(ArrayLibrary):
    """The boxes of an array in a foreign checkpoint, or of one of a streamed member of a state."""

    def describe(self, value: LocalBoxes) -> tuple[str, str]:
        return value.tag, value.dtype

    def local_boxes(self, value: LocalBoxes, key: str) -> LocalBoxes:
        return value


class _Sources(ArrayLibrary):
    has_device = None

    def describe(self, value: Source) -> tuple[str, str]:
        return type(value).__name__, value.dtype  # no load fills it

    def local_boxes(self, value: Source, key: str) -> LocalBoxes:
        parts = [(Box.whole(value.shape), value)]
        return LocalBoxes(value.shape, parts, value.dtype, ("source", id(value)), False)

    def copy_range(self, part: Source, start: int, stop: int, out: memoryview) -> None:
        part.read_into(start, out)


_BOXES = _Boxes()
_IMPORTED = _Imported()
_SOURCES = _Sources()
