"""torch's tensors that consist of other tensors: sparse ones, and those of some subclasses.

A class with ``__tensor_flatten__``, such as torchao's quantized tensors, says of which tensors its
objects consist, and with which context they are put together
(``torch.utils._python_dispatch.TraceableWrapperSubclass``), except ``DTensor`` (``sharding``). Any
such class is known, as torchao renames classes. None is looked up by the name in a snapshot, which
would select code.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any
from weakref import WeakKeyDictionary

from limpet import lazy_torch
from limpet.format import torch_types, tree
from limpet.format.names import join_key
from limpet.format.rejected import unsupported
from limpet.state import modules, sharding

_SAVE_NESTED = "Save list(tensor.unbind())"
_ROWS = {"crow": "crow_indices", "col": "col_indices", "values": "values"}
_COLUMNS = {"ccol": "ccol_indices", "row": "row_indices", "values": "values"}
SPARSE_PARTS = {
    "sparse_coo": {"indices": "_indices", "values": "_values"},
    "sparse_csr": _ROWS,
    "sparse_bsr": _ROWS,
    "sparse_csc": _COLUMNS,
    "sparse_bsc": _COLUMNS,
}
"""The parts of a sparse tensor by its layout, each with the method that returns the part."""


def is_subclass(value: Any) -> bool:
    """Return True for a tensor that consists of inner tensors, and is not distributed."""
    torch = lazy_torch.torch_or_none()
    kind = type(value)
    return (
        torch is not None
        and kind not in (torch.Tensor, torch.nn.Parameter)
        and isinstance(value, torch.Tensor)
        and callable(getattr(kind, "__tensor_flatten__", None))
        and callable(getattr(kind, "__tensor_unflatten__", None))
        and not sharding.is_distributed_tensor(value)
    )


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def inner_tensors(value: Any, key: str) -> dict[str, Any]:
    """Return the inner tensors by name. ``Unsupported``: it is nested, or one is not a tensor."""
    torch: Any = lazy_torch.torch_or_none()
    if value.is_nested:  # its shape has a symbol
        raise unsupported(value, key, "it is a nested tensor", _SAVE_NESTED)
    inner = {name: getattr(value, name, None) for name in _flatten(value, key)[0]}
    if not inner or not all(isinstance(t, torch.Tensor) for t in inner.values()):
        raise unsupported(value, key, f"its inner tensors {list(inner)} are not all tensors")
    return inner


def split_subclass(value: Any, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a node records besides the inner tensors, and these. Raises ``Unsupported``."""
    if isinstance(value, lazy_torch.torch_or_none().nn.parameter.UninitializedTensorMixin):
        why = "it has no shape before the first forward pass"
        raise unsupported(value, key, why, "Call the module once before the save")
    if not is_subclass(value):
        why = "it is a subclass of Tensor without __tensor_flatten__"
        raise unsupported(value, key, why, "Save tensor.as_subclass(torch.Tensor)")
    inner = inner_tensors(value, key)
    return describe(value, key), inner


def describe(value: Any, key: str) -> dict[str, Any]:
    """Return what a node records besides the inner tensors. Raises ``Unsupported`` for a context
    with other values than plain ones, torch's types, enums, and dataclasses."""

    def encode_other(item: Any, k: str, depth: int) -> Any:
        node = torch_types.encode(item)
        if node is not None:
            return node
        # these are only compared with those of a live tensor, and never created
        if isinstance(item, enum.Enum):
            return f"{class_name(item)}.{item.name}"
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
            return tree.encode([class_name(item), fields], k, encode_other, depth + 1)
        raise unsupported(item, k, f"the context of a {class_name(value)} must be plain")

    context_key = join_key(key, "~context")
    return {
        "class": class_name(value),
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "context": tree.encode(_flatten(value, key)[1], context_key, encode_other),
    }


def misfit(value: Any, node: Any, key: str) -> str:
    """Return how a live tensor differs from what its node records, without elements, or ""."""
    body, inner = node["subclass"], inner_tensors(value, key)
    for name, live in {**describe(value, key), "parts": [*inner]}.items():
        saved = [*body[name]] if name == "parts" else body[name]
        if repr(saved) != repr(live):  # 1 and True are different
            return f"{name} {saved}, live {live}"
    return ""


def _flatten(value: Any, key: str) -> tuple[list[str], Any]:
    effect = f"Nothing was saved or loaded. {modules.UNCHANGED}"
    with modules.calling(value, key, "__tensor_flatten__", effect):
        names, context = value.__tensor_flatten__()
    return list(names), context


def split_sparse(t: Any, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the node of a sparse tensor records, and its parts. Raises ``Unsupported`` for
    another tensor that is not dense, and for indices with which no load could create it."""
    layout = str(t.layout).removeprefix("torch.")
    problems = (
        (t.is_meta, "a meta tensor has no data", "Create it on another device before the save"),
        (t.is_quantized, "it is a quantized tensor", "Save its int_repr(), scale, and zero point"),
        (t.is_nested, "it is a nested tensor", _SAVE_NESTED),
        (layout not in SPARSE_PARTS, f"its layout {t.layout} is opaque", "Save to_dense()"),
    )
    for is_present, why, advice in problems:
        if is_present:
            raise unsupported(t, key, why, advice)
    t = t.detach()
    is_coalesced = layout == "sparse_coo" and t.is_coalesced()
    body = {"layout": layout, "shape": list(t.shape), "coalesced": is_coalesced}
    parts = {name: getattr(t, method)() for name, method in SPARSE_PARTS[layout].items()}
    *indices, values = parts.values()
    versions = [] if t.is_inference() else [(p.data_ptr(), p._version) for p in indices]
    stamp = (layout, t.shape, values.shape, versions)
    storage = indices[0].untyped_storage()
    if versions and _checked.get(storage) == stamp:
        return body, parts
    try:
        make_sparse(body, parts)
        _checked[storage] = stamp
    except BAD_PARTS as e:
        why = f"no load could create it: {str(e).partition(chr(10))[0][:200]}"
        raise unsupported(t, key, why, "Create it with check_invariants=True") from e
    return body, parts


_checked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By the storage of its first indices: what was checked of a sparse tensor, once. A change of its
values counts as one of its indices."""

BAD_PARTS = (RuntimeError, TypeError, ValueError, IndexError)


def make_sparse(body: Any, parts: dict[str, Any]) -> Any:
    """Return the sparse tensor of which a node records ``body``, without a copy of its parts. They
    may come from outside: raises one of ``BAD_PARTS``."""
    torch: Any = lazy_torch.torch_or_none()
    shape, values = tuple(body["shape"]), parts["values"]
    if body["layout"] == "sparse_coo":
        tensor = torch.sparse_coo_tensor(
            parts["indices"], values, shape, device=values.device, check_invariants=True
        )
        return tensor._coalesced_(body["coalesced"])
    by_rows = "crow" in parts
    compressed, plain = (parts[n] for n in (("crow", "col") if by_rows else ("ccol", "row")))
    make = functools.partial(
        torch.sparse_compressed_tensor,
        size=shape,
        layout=getattr(torch, body["layout"]),
        device=values.device,
    )
    try:
        return make(compressed, plain, values, check_invariants=True)
    except RuntimeError:
        # torch and SciPy also create tensors with plain indices that are not sorted or distinct.
        # All else is checked with the indices 0, 1, 2, ... of each row
        starts, stops, n = compressed[..., :-1], compressed[..., 1:], plain.shape[-1]
        wrong = (starts > stops, compressed[..., :1] != 0, compressed[..., -1:] != n)
        if any(bool(w.any()) for w in wrong):  # the next lines would need any amount of memory
            raise
        count = torch.arange(n, device=plain.device, dtype=plain.dtype)
        firsts = starts.flatten().repeat_interleave((stops - starts).flatten())
        make(compressed, count - firsts.view(plain.shape), values, check_invariants=True)
        dim = compressed.ndim - 1 + by_rows
        block = values.shape[dim + 1] if "bs" in body["layout"] else 1
        if not 0 <= plain.min() <= plain.max() < shape[dim] // block:
            raise
        return make(compressed, plain, values, check_invariants=False)
