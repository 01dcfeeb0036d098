"""Lazily read leaves of a snapshot, and the allocation of memory for them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from limpet import lazy_torch
from limpet.format.numpy_dtypes import from_descr
from limpet.layout.boxes import TensorIndex, box_from_index
from limpet.layout.read_plan import ReadRequest
from limpet.snapshot.chunks import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays import part_library
from limpet.tracebacks import short_tracebacks
from limpet.types import DTYPES, Box


@short_tracebacks
class LeafView:
    """A tensor or array of a snapshot. Indexing reads and checks the chunks that cover the part; a
    read of the whole leaf also checks the headers of its shards, as a load does."""

    def __init__(self, reader: SnapshotReader, key: str, node: Any) -> None:
        self._reader = reader
        self.key = key
        self._source_key = node.get("tied", key)
        self._node = reader.nodes()[self._source_key] if "tied" in node else node
        self.dtype, self.shape = self._stored_dtype, _ = reader.leaves[self._source_key]
        self._record_dtype: np.dtype[Any] | None = None
        if "array" in self._node and len(self._node["array"]) == 3:
            self._record_dtype = from_descr(self._node["array"][2])
            self.dtype, self.shape = str(self._record_dtype), self.shape[:-1]

    def __repr__(self) -> str:
        return f"<LeafView {self.key} {self.dtype} {list(self.shape)}>"

    def __getattr__(self, name: str) -> Any:
        what = f"a LeafView has no {name}: it describes values that are not read yet"
        raise AttributeError(f"{what}. Read them with read() or [...]", name=name, obj=self)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (self._record_dtype or DTYPES[self._stored_dtype]).itemsize

    def __getitem__(self, index: TensorIndex | tuple[TensorIndex, ...]) -> Any:
        """Return a part (integers, slices of step 1, and ``...``) as a tensor on the CPU, or as an
        array if the leaf was one. Raises ``IndexError``, ``FormatError``, and ``StoreError``."""
        box, dropped_dims = box_from_index(index, self.shape)
        self._reader.indexes()  # checks the shape before memory is allocated for it
        sizes = [n for dim, n in enumerate(box.sizes) if dim not in dropped_dims]
        if self._record_dtype is not None:  # stored as rows of bytes
            box = Box((*box.offsets, 0), (*box.sizes, self._record_dtype.itemsize))
        into = allocate(self._node, self._source_key, self._stored_dtype, box.sizes)
        if box.numel:
            self._reader.read(
                [ReadRequest(self._source_key, box)],
                [Target.from_tensor(self._stored_dtype, box.sizes, into)],
                check_headers=tuple(sizes) == self.shape,
            )
        if self._record_dtype is not None:
            into = as_records(into, self._record_dtype)
        return into.reshape(sizes)

    def read(self) -> Any:
        """Return the whole leaf."""
        return self[...]


def as_records(rows: Any, dtype: np.dtype[Any]) -> Any:
    """Return rows of bytes as an array of ``dtype``, which has no name in the format."""
    return rows.reshape(-1).view(dtype) if rows.size else np.empty(rows.shape[:-1], dtype)


def allocate(node: Any, key: str, dtype: str, sizes: tuple[int, ...], device: Any = None) -> Any:
    """Allocate elements of a leaf: an array, or a torch tensor for a tensor, with the saved order
    of dimensions. Raises ``LimpetError`` if torch is not installed or does not know the dtype."""
    if "tensor" not in node:
        return part_library(np.ndarray).empty(key, dtype, sizes, device)
    torch = lazy_torch.import_torch(f"The leaf {key!r} is a torch tensor")
    device = "cpu" if device is None else device  # not that of ``torch.set_default_device``
    with torch.inference_mode(False):  # nothing could be trained with an inference tensor
        if len(node["tensor"]) > 2 and hasattr(torch, dtype):
            order, found = node["tensor"][2], getattr(torch, dtype)
            return torch.empty_permuted(sizes, order, dtype=found, device=device)
        return part_library(torch.Tensor).empty(key, dtype, sizes, device)
