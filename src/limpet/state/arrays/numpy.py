"""NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from limpet.format.numpy_dtypes import from_descr, to_descr
from limpet.format.rejected import unsupported
from limpet.layout.boxes import contiguous_boxes
from limpet.state.arrays import ArrayLibrary, LocalBoxes, Memory, leaf_node
from limpet.state.copy_pool import CopyPool
from limpet.types import DTYPES, Box

Array = np.ndarray[Any, Any]

_NAMES = {c: name for c in np.typecodes["All"] if (name := np.dtype(c).name) in DTYPES}
"""By the character of a dtype: its name, which is slow to look up."""


def library_of(cls: type) -> ArrayLibrary | None:
    return _LIBRARY if issubclass(cls, np.ndarray) else None


class _NumpyArrays(ArrayLibrary):
    plain_types = (np.ndarray,)

    def describe(self, value: Array) -> tuple[str, str]:
        dtype = value.dtype
        # a dtype of another package may have the name or the character of one of NumPy's
        if dtype.isbuiltin == 1 and (name := _NAMES.get(dtype.char) or dtype.name) in DTYPES:
            return "array", name
        try:  # as it will be loaded
            return "array", str(from_descr(to_descr(dtype)))
        except ValueError:
            return "array", repr(dtype)

    def local_boxes(self, value: Array, key: str) -> LocalBoxes:
        tag, dtype = self.describe(value)
        if dtype not in DTYPES:  # rows of bytes
            rows = (*value.shape, value.dtype.itemsize)
            value = value[..., None].view(np.uint8) if value.nbytes else np.empty(rows, np.uint8)
            dtype = "uint8"
        return LocalBoxes(value.shape, [(Box.whole(value.shape), value)], dtype, None, False, tag)

    def boxes_to_save(self, value: Array, key: str) -> LocalBoxes:
        if type(value) is not np.ndarray:
            raise unsupported(value, key, "it is a subclass of ndarray")
        if self.describe(value)[1] in DTYPES and not value.dtype.metadata:
            return self.local_boxes(value, key)
        try:
            descr = to_descr(value.dtype)
        except ValueError as e:
            advice = "Save array.tolist(), or convert it to a dtype without objects"
            if value.dtype.isbuiltin == 2:
                advice = f'Save array.view("u{value.itemsize}"), and view it as the dtype again'
            elif not value.dtype.hasobject:
                advice = ""
            raise unsupported(value, key, str(e), advice) from e
        rows = (*value.shape, value.dtype.itemsize)
        node = leaf_node(value, LocalBoxes(rows, (), "uint8", tag="array"), key, descr)
        return structs.replace(self.local_boxes(value, key), node=node)

    def target(self, value: Array, part: Array, key: str) -> Array:
        return part if part.flags.writeable else np.empty(part.shape, part.dtype)

    def loaded(self, value: Array, targets: Sequence[tuple[Box, Any]]) -> Array:
        array: Array = targets[0][1]
        if array.ndim > value.ndim:
            array = array.view(value.dtype).reshape(value.shape)
        if array is value or not value.flags.writeable:
            return array
        value[...] = array
        return value

    def can_cast(self, stored: str, value: Array) -> bool:
        try:
            dtype = np.dtype(stored)
        except (TypeError, ValueError):  # records, or a name that NumPy does not have
            return False
        kinds = {dtype.kind, value.dtype.kind}
        return kinds <= set("biufc") and np.can_cast(dtype, value.dtype, "same_kind")

    def copy(self, value: Array, pool: CopyPool) -> Array:
        if value.dtype.isbuiltin != 1 or value.dtype.metadata or value.dtype.hasobject:
            return value.copy()
        copy: Array = pool.copy(
            object(),  # never tied
            (value.shape, value.dtype, "array"),
            value.nbytes,
            lambda: np.empty(value.shape, value.dtype),
            lambda copy: np.copyto(copy, value),
        )
        return copy

    def address(self, part: Array) -> int:
        return int(part.__array_interface__["data"][0]) if part.flags.c_contiguous else 0

    def copy_range(self, part: Array, start: int, stop: int, out: memoryview) -> None:
        size, done = part.itemsize, 0
        for box in contiguous_boxes(part.shape, start // size, stop // size):
            target = np.ndarray(box.sizes, part.dtype, out, done)
            target[...] = part[box.slices((0,) * part.ndim)]
            done += target.nbytes

    def empty(self, key: str, dtype: str, shape: Sequence[int], device: Any) -> Array:
        return np.empty(shape, dtype)

    def memory(self, part: Array) -> Memory | None:
        address = int(part.__array_interface__["data"][0])
        sizes, strides = part.shape, part.strides
        if part.flags.c_contiguous:
            sizes, strides = (part.size,), (part.itemsize,)
        form = part.dtype
        return Memory("cpu", address, part.itemsize, sizes, strides, form) if part.nbytes else None

    def empty_like(self, part: Array) -> Array:
        return np.empty(part.shape, part.dtype)

    def elements(self, dtype: str, shape: Sequence[int], memory: memoryview, offset: int) -> Array:
        return np.ndarray(shape, dtype, memory, offset)

    def target_address(self, part: Array, dtype: str) -> int:
        is_direct = part.flags.writeable and part.size and part.dtype == np.dtype(dtype)
        return self.address(part) if is_direct else 0


_LIBRARY = _NumpyArrays()
