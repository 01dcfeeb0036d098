"""The one seam to the libraries of arrays: NumPy, torch, and the package's own kinds.

A state has *values*, such as an array, a ``DTensor``, or a ``Boxed``. The elements that this
process has of a value are *parts*: arrays in one piece, each a box of the global array. Saves,
loads, and savepoints handle both through the ``ArrayLibrary`` of their type. To add a library,
write a module with a subclass, and add its line to ``LIBRARIES``.

What is torch's own stays where it is handled: modules, optimizers, random generators, process
groups, and tensors that consist of others (``composites``).

Terms: *value*, *part*, *library*.
May import: the root modules, ``format``, ``layout``, and the rest of ``state``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from limpet.format.rejected import unsupported
from limpet.format.tree import is_valid_shape
from limpet.types import DTYPES, Box

if TYPE_CHECKING:
    from limpet.state.copy_pool import CopyPool

LIBRARIES = {
    "numpy": "limpet.state.arrays.numpy",
    "torch": "limpet.state.arrays.torch",
    "limpet": "limpet.state.arrays.own",
}
"""By the package of a class: the module whose ``library_of`` returns the library of the class, or
None. It is imported by ``flatten`` if the package was imported, or with the first value."""


def _find_library(cls: type) -> ArrayLibrary | None:
    modules = (LIBRARIES.get(base.__module__.partition(".")[0]) for base in cls.__mro__[:-1])
    found = (import_module(module).library_of(cls) for module in modules if module is not None)
    return next((library for library in found if library is not None), None)


library_of: Callable[[type], ArrayLibrary | None] = lru_cache(256)(_find_library)
"""Return the library of the arrays of a class, or None if its instances are no arrays. Nearly all
values have one of a few types, so this is one look-up in a cache."""

part_library: Callable[[type], ArrayLibrary] = library_of  # type: ignore[assignment]
"""``library_of`` for the class of a part, or of another array, which has a library."""


class LocalBoxes(msgspec.Struct, frozen=True, gc=False):
    """The boxes of one global array that this process has, each with the part that has its
    elements. Each rank that has an array without elements lists it as one box.

    ``tie_key``: hashable, and equal for one tensor under several names, also on ranks without
    elements; None or 0 for what is never tied, such as an ``array``. Others may have an equal one,
    unless ``is_declared``: the value itself states which box each rank has, so ranks that have the
    same box have the same elements.
    """

    shape: tuple[int, ...]  # of the global array
    box_tensors: Sequence[tuple[Box, Any]]
    dtype: str
    tie_key: Any = None
    is_declared: bool = True
    tag: str = "tensor"  # of the leaf's node
    node: Any = None  # the leaf's node, if the library has made it


def leaf_node(value: Any, boxes: LocalBoxes, key: str, *descr: Any) -> dict[str, Any]:
    """Return the node of a leaf. ``descr``: the dtype as JSON, if the parts are rows of uint8, or
    a tensor's order of dimensions in memory, if it is not the usual one. Raises ``Unsupported`` for
    a dtype without a name in the format, and for a shape too large."""
    shape = boxes.shape
    if boxes.dtype not in DTYPES:
        raise unsupported(value, key, f"Limpet cannot write the dtype {value.dtype}")
    if not is_valid_shape(boxes.dtype, shape):
        why = f"the shape {shape[:8]} with {len(shape)} dimensions is too large"
        raise unsupported(value, key, why)
    return {boxes.tag: [boxes.dtype, list(shape), *descr]}


class Memory(NamedTuple):
    """Where the elements of a part are, equal for parts that are the same elements: the address of
    the first one, and the size and the stride in bytes of each dimension (of contiguous elements,
    one). ``form``: how the bytes represent an element."""

    device: str
    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    form: Any

    @property
    def range(self) -> tuple[int, int]:
        """The addresses of the first byte, and of the one after the last."""
        spans = [(n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)]
        end = sum(s for s in spans if s > 0) + self.itemsize
        return self.address + sum(s for s in spans if s < 0), self.address + end


class ArrayLibrary(ABC):
    """How the arrays of one library are saved, loaded, and copied.

    A part has ``shape`` and ``nbytes``, a slice of it is a part, and a part on an accelerator has
    its ``device``. ``tag``: that of the leaves' nodes. Without a live value, a leaf ``tensor`` is
    loaded as a torch tensor, and a leaf ``array`` as a NumPy array. ``has_device``: whether parts
    have a ``device`` that a load may ask for; None if it is not known. ``plain_types``: the classes
    of which a ``Boxed`` may have a part. ``count_change``: a function that counts a change of a
    target whose memory will be written to.
    """

    tag: ClassVar[str] = "array"
    has_device: ClassVar[bool | None] = False
    plain_types: ClassVar[tuple[type, ...]] = ()
    count_change: ClassVar[Any] = None

    @abstractmethod
    def describe(self, value: Any) -> tuple[str, str]:
        """Return the tag of the nodes that can be loaded into a value, or what it is instead, and
        the name of its dtype. Libraries have only names in ``DTYPES`` in common."""

    @abstractmethod
    def local_boxes(self, value: Any, key: str) -> LocalBoxes:
        """Return the boxes of a dense value, with parts in its memory. Raises ``Unsupported``."""

    def boxes_to_save(self, value: Any, key: str) -> LocalBoxes | None:
        """Return the boxes of a value, with parts whose bytes are its elements; None if it consists
        of other values, which ``split`` returns. Raises ``Unsupported``."""
        return self.local_boxes(value, key)

    def split(self, value: Any, key: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Return the tag of the value's node, what the node records besides the values of which
        the value consists, and these, by name. Raises ``Unsupported``."""
        raise NotImplementedError

    def target(self, value: Any, part: Any, key: str) -> Any:
        """Return what a load writes to for a part: the part itself, or new memory for one that
        cannot be written to. Raises ``PlanError``."""
        return part

    def loaded(self, value: Any, targets: Sequence[tuple[Box, Any]]) -> Any:
        """Return what the live state gets once the targets of the boxes are written: the value, or
        a new one if it cannot be written to."""
        return value

    def can_cast(self, stored: str, value: Any) -> bool:
        """Return True if ``cast=True`` may convert elements of ``stored`` to the value's dtype."""
        return False

    def copy(self, value: Any, pool: CopyPool) -> Any:
        """Return a copy of a value in the pool's memory, or the value if it does not change."""
        return value

    # -- parts to save -----------------------------------------------------------------------------

    def address(self, part: Any) -> int:
        """Return the address of the elements, or 0 if they are not contiguous in host memory."""
        return 0

    def addresses(self, parts: Sequence[Any]) -> list[int]:
        return [*map(self.address, parts)]

    def copy_range(self, part: Any, start: int, stop: int, out: memoryview) -> None:
        """Fill ``out`` with bytes ``start`` to ``stop``, in row-major order, of a part without
        ``address``. A copy from an accelerator may end only with ``synchronize``."""
        raise NotImplementedError

    def accelerators(self, parts: Iterable[Any]) -> set[Any]:
        """Return the accelerators that hold parts, of which some may be of other libraries."""
        return set()

    def synchronize(self, parts: Sequence[Any]) -> None:  # noqa: B027  (most have no accelerators)
        """Wait for the work that this thread has queued on the accelerators that hold parts."""

    def streams(self, parts: Sequence[Any]) -> AbstractContextManager[object]:
        """Return a context in which copies overlap other work of the accelerators."""
        return nullcontext()

    def digest(self, part: Any) -> bytes | None:
        """Return 16 bytes computed from a part on its accelerator; None to digest its bytes."""
        return None

    def version(self, part: Any) -> object:
        """Return what differs after a change of a part, if the library counts changes."""
        return None

    # -- targets: the parts that a load writes to --------------------------------------------------

    def empty(self, key: str, dtype: str, shape: Sequence[int], device: Any) -> Any:
        """Return a target for a leaf without a live value. Raises ``LimpetError``."""
        raise NotImplementedError

    def elements(self, dtype: str, shape: Sequence[int], memory: memoryview, offset: int) -> Any:
        """Return elements in host memory, to be assigned to slices of a target."""
        raise NotImplementedError

    def target_address(self, part: Any, dtype: str) -> int:
        """Return ``address``, or 0 if elements of ``dtype`` must be assigned instead."""
        raise NotImplementedError

    def memory(self, part: Any) -> Memory | None:
        """Return where the elements of a target are; None if it has none, or shares no memory."""
        return None

    def empty_like(self, part: Any) -> Any:
        """Return a contiguous target in new host memory that represents elements as a part does."""
        raise NotImplementedError
