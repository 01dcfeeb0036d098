"""torch's tensors: dense ones, those that are distributed over ranks, and on CUDA devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from math import prod
from operator import attrgetter, mul
from typing import Any

import msgspec
import torch

from limpet.errors import LimpetError, PlanError
from limpet.format.rejected import unsupported
from limpet.layout.boxes import contiguous_boxes
from limpet.state import composites, sharding
from limpet.state.arrays import ArrayLibrary, LocalBoxes, Memory, leaf_node
from limpet.state.copy_pool import CopyPool, is_plain
from limpet.state.loadable import shares_elements
from limpet.state.walk import storage_address, to_local
from limpet.types import MIB, Box

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor, _Parameter = _PLAIN  # faster to look up, as is the layout
_STRIDED = torch.strided
_cuda: Any = torch.cuda
_MAX_LAYOUTS = 10_000
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PACKED = "float4_e2m1fn_x2"


def library_of(cls: type) -> ArrayLibrary | None:
    return _LIBRARY if issubclass(cls, torch.Tensor) else None


@lru_cache(256)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_layouts: dict[Any, tuple[tuple[int, ...], Box, str, dict[str, Any]]] = {}
"""By dtype and shape: what tensors have in common. Nothing may change the nodes."""


class _TorchTensors(ArrayLibrary):
    tag = "tensor"
    has_device = True
    plain_types = _PLAIN
    # PyTorch does not see the write. With this, a backward pass that needs the old values raises.
    count_change = staticmethod(torch.autograd.graph.increment_version)

    def describe(self, value: Any) -> tuple[str, str]:
        kind = "tensor"
        if type(value) not in _PLAIN and composites.is_subclass(value):
            kind = "subclass"
        elif value.layout is not torch.strided:
            kind = str(value.layout).replace("torch.", "tensor ")
        return kind, _name(value.dtype)

    def local_boxes(self, value: Any, key: str) -> LocalBoxes:
        boxes = None if type(value) in _PLAIN else sharding.get_local_boxes(value, key)
        if boxes is not None:
            return boxes
        part = value.detach() if value.requires_grad else value
        shape, name = tuple(value.shape), _name(value.dtype)
        return LocalBoxes(shape, ((Box.whole(shape), part),), name, _address(part, key), False)

    def boxes_to_save(self, value: Any, key: str) -> LocalBoxes | None:
        """This is called for every leaf of a model: keep it short."""
        if type(value) is not _Tensor and type(value) is not _Parameter:
            boxes = sharding.get_local_boxes(value, key)
            if boxes is not None and sharding.is_dtensor(value) and not value.is_contiguous():
                node = leaf_node(value, boxes, key, *_memory_order(value))
                boxes = msgspec.structs.replace(boxes, node=node)
            return None if boxes is None else sharding.resolve_parts(boxes)
        if value.layout is not _STRIDED or value.is_nested:
            return None
        layout = _layouts.get((value.dtype, value.shape))
        if layout is None:
            if value.is_quantized:
                return None
            if len(_layouts) >= _MAX_LAYOUTS:
                _layouts.clear()
            shape, name = tuple(value.shape), _name(value.dtype)
            node = leaf_node(value, LocalBoxes(shape, (), name), key)
            layout = _layouts[value.dtype, value.shape] = shape, Box.whole(shape), name, node
        if value.requires_grad:
            value = value.detach()
        if value.is_neg() or value.is_conj():
            value = value.resolve_conj().resolve_neg()
        shape, box, name, node = layout
        if not value.is_contiguous():
            node = {"tensor": [*node["tensor"], *_memory_order(value)]}
        address = _address(value, key)
        if not address:
            if value.is_meta:
                return None
            if 0 not in shape:
                raise unsupported(value, key, "its memory has been freed")
        return LocalBoxes(shape, ((box, value),), name, address, False, "tensor", node)

    def split(self, value: Any, key: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        if type(value) not in _PLAIN:
            return "subclass", *composites.split_subclass(value, key)
        return "sparse", *composites.split_sparse(value, key)

    def target(self, value: Any, part: Any, key: str) -> Any:
        if not part.is_contiguous() and shares_elements(part):
            raise PlanError(
                f"The live tensor {key!r} is expanded: several of its elements share memory",
                todo="Put a tensor with its own memory into the live state:"
                " tensor.clone(memory_format=torch.contiguous_format)",
                leaf=key,
            )
        if not part.data_ptr() and part.numel():
            raise PlanError(
                f"The live tensor {key!r} has no memory to load into",
                found=f"a tensor on {part.device} whose memory was freed or never allocated",
                todo=sharding.MATERIALIZE,
                leaf=key,
            )
        if part.is_inference():  # this load may be outside of the inference mode
            with torch.inference_mode(False):
                return torch.utils.dlpack.from_dlpack(part)
        return part

    def can_cast(self, stored: str, value: Any) -> bool:
        """A conversion discards no imaginary part or fraction, and unpacks nothing."""
        fits = hasattr(torch, stored) and torch.can_cast(getattr(torch, stored), value.dtype)
        return fits and _PACKED not in (stored, _name(value.dtype))

    def copy(self, value: Any, pool: CopyPool) -> Any:
        """Return the same copy for tied tensors, so that they stay tied."""
        if storage_address(value) in pool.stable_storages:
            return value
        if type(value) not in _PLAIN:
            if not sharding.is_distributed_tensor(value):
                return _copy_subclass(value, pool)
            pool.count(int(to_local(value).nbytes))
            return value.detach().clone()
        t = value.detach()
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_meta:
            return t.clone()
        made = pool.copies_by_address.get(t.data_ptr())
        if made is not None and (made.shape, made.dtype) == (t.shape, t.dtype) and is_plain(t):
            return made
        pool.copied_addresses.add(t.data_ptr())
        return pool.copy(
            (t.data_ptr(), t.stride(), t.is_conj(), t.is_neg()),
            (t.shape, t.stride(), t.dtype, t.device),
            t.numel() * t.element_size(),
            lambda: torch.empty_like(t),
            lambda copy: copy.copy_(t),
        )

    # -- parts to save -----------------------------------------------------------------------------

    def address(self, part: Any) -> int:
        return int(part.data_ptr()) if part.is_cpu and part.is_contiguous() else 0

    def addresses(self, parts: Sequence[Any]) -> list[int]:
        if not {*map(type, parts)} <= {*_PLAIN} or not all(map(attrgetter("is_cpu"), parts)):
            return [*map(self.address, parts)]
        addresses = map(torch.Tensor.data_ptr, parts)  # a third of the time
        return [*map(mul, addresses, map(torch.Tensor.is_contiguous, parts))]

    def copy_range(self, part: Any, start: int, stop: int, out: memoryview) -> None:
        """Copy as integers of the same size, which preserves every bit pattern of every dtype."""
        if part.is_complex():
            part = torch.view_as_real(part)
        size = part.element_size()
        part = part.view(_INTEGERS[size])
        if part.is_contiguous():
            part = part.view(-1)  # then one copy suffices
        done = 0
        for box in contiguous_boxes(tuple(part.shape), start // size, stop // size):
            target = torch.frombuffer(out, dtype=part.dtype, count=box.numel, offset=done)
            elements = part[box.slices((0,) * part.ndim)]
            target.view(box.sizes).copy_(elements, non_blocking=True)
            done += target.nbytes

    def accelerators(self, parts: Iterable[Any]) -> set[Any]:
        if not _cuda.is_initialized():  # no tensor can be on a device
            return set()
        return {part.device for part in parts if getattr(part, "is_cuda", False)}

    def synchronize(self, parts: Sequence[Any]) -> None:
        if _cuda.is_initialized():  # saves a call
            for device in self.accelerators(parts):
                _cuda.current_stream(device).synchronize()

    @contextmanager
    def streams(self, parts: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as entered:
            for device in self.accelerators(parts):
                entered.enter_context(_cuda.stream(_cuda.Stream(device)))
            yield

    def digest(self, part: Any) -> bytes | None:
        return None if part.is_cpu else digest_on_device(part)

    def version(self, part: Any) -> tuple[int, int]:
        """Return the version counter, too. It misses changes through ``p.data``."""
        return part.data_ptr(), 0 if part.is_inference() else part._version

    # -- parts to load -----------------------------------------------------------------------------

    def empty(self, key: str, dtype: str, shape: Sequence[int], device: Any) -> Any:
        if not hasattr(torch, dtype):
            raise LimpetError(
                f"The leaf {key!r} has dtype {dtype}, which torch {torch.__version__} does not"
                " support",
                todo="Install a newer version of torch, or exclude the leaf with keys=",
                leaf=key,
            )
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    def elements(self, dtype: str, shape: Sequence[int], memory: memoryview, offset: int) -> Any:
        found = getattr(torch, dtype)
        return torch.frombuffer(memory, dtype=found, count=prod(shape), offset=offset).view(shape)

    def target_address(self, part: Any, dtype: str) -> int:
        is_direct = part.is_cpu and part.is_contiguous() and _name(part.dtype) == dtype
        return int(part.data_ptr()) if is_direct and not (part.is_neg() or part.is_conj()) else 0

    def memory(self, part: Any) -> Memory | None:
        address, size = part.data_ptr(), part.element_size()
        if not address:
            return None
        sizes, strides = (part.numel(),), (size,)
        if not part.is_contiguous():
            sizes, strides = tuple(part.shape), tuple(s * size for s in part.stride())
        form = part.dtype, part.is_conj(), part.is_neg()
        return Memory(
            "cpu" if part.is_cpu else str(part.device), address, size, sizes, strides, form
        )

    def empty_like(self, part: Any) -> Any:
        made = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        made = made.conj() if part.is_conj() else made
        return torch._neg_view(made) if part.is_neg() else made


def _address(t: Any, key: str) -> int:
    """Return the address of a tensor's first element, or 0 without one."""
    try:
        return int(t.data_ptr())
    except RuntimeError as e:
        why = "it has no memory, as within a transform of torch.func"
        raise unsupported(t, key, why, "Do this outside of the transform") from e


def _memory_order(t: Any) -> list[list[int]]:
    """Return the dimensions of a tensor from the outermost in memory to the innermost; nothing if
    they have the usual order, or if elements share memory."""
    strides = t.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return [] if 0 in strides or order == [*range(len(strides))] else [order]


_LIBRARY = _TorchTensors()


def _copy_subclass(t: Any, pool: CopyPool) -> Any:
    if not composites.is_subclass(t):
        return t  # flatten rejects it and names it
    names, context = t.__tensor_flatten__()
    inner = {}
    for name in names:
        part = getattr(t, name)
        if composites.is_subclass(part):
            inner[name] = _copy_subclass(part, pool)
        else:  # not into memory that is reused: the attribute may be a temporary tensor
            pool.count(part.nbytes)
            inner[name] = part.detach().clone()
    return type(t).__tensor_unflatten__(inner, context, t.shape, t.stride())


_WORDS_PER_STEP = 4 * MIB
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))


def digest_on_device(tensor: Any) -> bytes:
    """Return two sums of the 64-bit words, each multiplied by a number derived from its position,
    computed on the tensor's own device. Only 16 bytes are copied to the CPU."""
    raw = tensor.contiguous().view(-1)
    raw = torch.view_as_real(raw).reshape(-1) if raw.is_complex() else raw
    raw = raw.view(torch.uint8)
    remainder = raw.numel() % 8
    if remainder:
        raw = torch.cat([raw, raw.new_zeros(8 - remainder)])
    words = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for at in range(0, words.numel(), _WORDS_PER_STEP):
        block = words[at : at + _WORDS_PER_STEP]
        positions = torch.arange(at + 1, at + 1 + block.numel(), device=words.device)
        for i, multiplier in enumerate(_MULTIPLIERS):
            mixed = (block ^ (block >> 29)) * (positions * multiplier | 1)
            sums[i] += (mixed ^ (mixed >> 32)).sum()
    return bytes(sums.cpu().numpy().tobytes())
