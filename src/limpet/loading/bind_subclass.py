"""Load a tensor of a class with ``__tensor_flatten__``: its inner tensors are filled in place."""

from __future__ import annotations

from typing import Any

from limpet.format import tree
from limpet.lazy_torch import dtype_name
from limpet.loading.binding import Binding
from limpet.loading.targets import Finalize, tag_of
from limpet.state import subclasses


def bind_subclass(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind a live tensor and a node, of which at least one is of another class than ``Tensor``.

    The names of the class and of the inner tensors, the dtype, the shape, and the context must be
    those that were saved. No class is looked up by its name.
    """
    if tag_of(node) != "subclass" or not subclasses.is_subclass(value):
        saved = node["subclass"]["class"] if tag_of(node) == "subclass" else tag_of(node)
        binding.differences.kinds[key] = f"{saved}, live {subclasses.class_name(value)}"
        return lambda: value
    body, inner = node["subclass"], subclasses.inner_tensors(value, key)
    live = {**subclasses.describe(value, key), "parts": list(inner)}
    for name, found in live.items():
        expected = list(body[name]) if name == "parts" else body[name]
        if repr(expected) != repr(found):  # 1 and True are different
            binding.differences.kinds[key] = f"{name} {expected}, live {found}"
            return lambda: value
    for (part, k), tensor in zip(tree.parts(node, key), inner.values(), strict=True):
        if subclasses.is_subclass(tensor) or tag_of(part) == "subclass":
            bind_subclass(binding, tensor, part, k)
        elif (source := binding.tensor_source(tensor, part, k)) is not None:
            stored = binding.targets.snapshot.leaves[source][0]
            if stored == dtype_name(tensor.dtype):
                binding.add_tensor(tensor, source, k)
            else:  # cast=True would change the meaning of the elements
                binding.differences.dtypes[k] = f"{stored}, live {dtype_name(tensor.dtype)}"
    return lambda: value
