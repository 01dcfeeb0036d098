"""Where loaded bytes go: into live objects in place, or into fresh tensors for the caller.

Binding compares a snapshot's tree with the live state, collects every difference, and decides
for each leaf its target. Nothing of the live state is touched before all differences are known;
``settle`` sets values and calls ``load_state_dict`` once the bytes are in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast import lazy_torch
from holdfast.engine.loading.bind_module import bind_module
from holdfast.engine.loading.bind_optimizer import bind_optimizer
from holdfast.engine.loading.bind_ranks import bind_per_rank, bind_wrapped
from holdfast.engine.loading.binding import Binding
from holdfast.engine.loading.targets import Finalize
from holdfast.engine.planning.select import ABSENT
from holdfast.engine.state import modules, optimizers
from holdfast.engine.state.replication import Replicated, keeps_per_rank
from holdfast.engine.state.sharding import Boxed
from holdfast.format import tree
from holdfast.format.names import join_key
from holdfast.lazy_torch import dtype_name

_NON_VALUE_TAGS = frozenset(
    {"tensor", "array", "tied", "sparse", "dict", "ordered", "items", "list", "tuple"}
)


class Binder(Binding):
    """Binds a live state to the nodes of a snapshot's tree.

    Every ``bind`` returns a function that gives the value which then belongs in the live
    state's place: the live object itself wherever it could be filled in place.
    """

    def bind(self, value: Any, node: Any, key: str) -> Finalize:
        torch = self.torch
        # tensors first: there are many of them, and asking them for attributes is slow
        if torch is not None and isinstance(value, torch.Tensor):
            return self._bind_leaf(self._bind_tensor, value, node, key)
        if isinstance(value, np.ndarray):
            return self._bind_leaf(self._bind_array, value, node, key)
        if isinstance(value, dict) and (type(value) is dict or not modules.is_stateful(value)):
            return self._bind_dict(value, node, key)
        if type(value) in (list, tuple):
            return self._bind_sequence(value, node, key)
        if isinstance(value, Boxed):
            return self._bind_leaf(self._bind_boxed, value, node, key)
        if isinstance(value, Replicated):
            return bind_wrapped(self, self.bind, value, node, key)
        if keeps_per_rank(value) and not self.inside_wrapper:
            return bind_per_rank(self, self.bind, value, node, key)
        if modules.is_module(value):
            return bind_module(self, value, node, key)
        if optimizers.is_standard_optimizer(value):
            return bind_optimizer(self, value, node, key)
        if modules.is_stateful(value):
            return self.bind_stateful(value, node, key)
        return self._bind_leaf(self._bind_value, value, node, key)

    def _bind_leaf(
        self, bind: Callable[[Any, Any, str], Finalize], value: Any, node: Any, key: str
    ) -> Finalize:
        """Bind one leaf or plain value, if it is selected and there."""
        if node is not ABSENT and self.selected(key):
            return bind(value, node, key)
        if node is ABSENT and self.selected(key):
            self.differences.missing.append(key)
        return lambda: value

    def _bind_value(self, value: Any, node: Any, key: str) -> Finalize:
        """A plain value is replaced by another one; None, where there is nothing yet, by all."""
        if value is not None and type(node) is dict and next(iter(node)) in _NON_VALUE_TAGS:
            self.note_other_kind(type(value).__name__, node, key)
            return lambda: value
        return self.targets.add_fresh(node, key)

    # -- containers ----------------------------------------------------------------------------

    def _bind_dict(self, value: Any, node: Any, key: str) -> Finalize:
        members = self.dict_members(value, node, key)
        if members is None:
            return lambda: value
        settles = {}
        for name, own in zip(value, tree.child_keys(list(value), key), strict=True):
            # the snapshot's own key: where two names are equal as text, it tells which is which
            child, k = members.pop(name, (ABSENT, own))
            settles[name] = self.bind(value[name], child, k)
        self.note_unexpected(members)

        def settle() -> Any:
            for name, s in settles.items():
                value[name] = s()
            return value

        return settle

    def _bind_sequence(self, value: Any, node: Any, key: str) -> Finalize:
        tag = next(iter(node), None) if type(node) is dict else None
        nodes = node[tag] if tag in ("list", "tuple") else None
        if nodes is None and node is not ABSENT:
            if self.selected(key):
                self.note_other_kind(type(value).__name__, node, key)
            return lambda: value
        if (
            nodes is not None
            and len(nodes) != len(value)
            and not any(map(_is_filled_in_place, value))
        ):
            return self._bind_resized(value, node, key)
        settles = [
            self.bind(v, nodes[i] if nodes and i < len(nodes) else ABSENT, join_key(key, str(i)))
            for i, v in enumerate(value)
        ]
        more = (nodes or ())[len(value) :]
        self.note_unexpected(
            {i: (n, join_key(key, str(i))) for i, n in enumerate(more, len(value))}
        )

        def settle() -> Any:
            made = [s() for s in settles]
            if type(value) is list:
                value[:] = made
                return value
            return tuple(made)

        return settle

    def _bind_resized(self, value: Any, node: Any, key: str) -> Finalize:
        """A list of plain values (a history, say) takes the length that it was saved with."""
        if not self.is_any_selected(node, key):
            return lambda: value
        make = self.targets.add_fresh(node, key)

        def settle() -> Any:
            if type(value) is list:
                value[:] = make()
                return value
            return make()

        return settle

    # -- leaves --------------------------------------------------------------------------------

    def _bind_tensor(self, value: Any, node: Any, key: str) -> Finalize:
        if type(node) is dict and "sparse" in node:
            return self._bind_sparse(value, node, key)
        source = self.tensor_source(value, node, key)
        if source is not None:
            self.add_tensor(value, source, key)
        return lambda: value

    def _bind_boxed(self, value: Boxed, node: Any, key: str) -> Finalize:
        local = value.tensor
        array = isinstance(local, np.ndarray)
        source = self.leaf_source(node, key, "array" if array else "tensor")
        if source is None:
            self.note_other_kind("array" if array else "tensor", node, key)
        elif self.check_fits(local, source, key, value.shape):
            self.add_tensor(value, source, key)
        return lambda: value

    def _bind_sparse(self, value: Any, node: Any, key: str) -> Finalize:
        """A sparse tensor is replaced: the number of its elements is its own."""
        body = node["sparse"]
        shape, layout = list(value.shape), str(value.layout).removeprefix("torch.")
        source = self.targets.resolve_leaf(body["parts"]["values"], join_key(key, "values"))[0]
        stored, live_dtype = self.targets.snapshot.leaves[source][0], dtype_name(value.dtype)
        if layout != body["layout"]:
            self.note_other_kind(f"tensor {layout}", node, key)
        elif shape != body["shape"]:
            self.differences.shapes[key] = f"{body['shape']}, live {shape}"
        elif stored != live_dtype:
            self.differences.dtypes[key] = f"{stored}, live {live_dtype}"
        return self.targets.add_fresh(node, key, value.device)

    def _bind_array(self, value: np.ndarray[Any, Any], node: Any, key: str) -> Finalize:
        source = self.leaf_source(node, key, "array")
        if source is None:
            self.note_other_kind("array", node, key)
            return lambda: value
        name, shape, *descr = self.targets.resolve_leaf(node, key)[1]["array"]
        dtype = tree.from_descr(descr[0]) if descr else np.dtype(name)
        shape = shape[:-1] if descr else shape
        if list(value.shape) != shape:
            self.differences.shapes[key] = f"{shape}, live {list(value.shape)}"
        elif value.dtype != dtype and not (self.cast and _can_cast_array(dtype, value.dtype)):
            self.differences.dtypes[key] = f"{dtype}, live {value.dtype}"
        elif value.flags.writeable and not descr:
            self.targets.add(source, value)
        else:
            make = self.targets.add_fresh(node, key)
            return lambda: _assign(value, make())
        return lambda: value

    # -- objects -------------------------------------------------------------------------------


def _can_cast_array(stored: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """As ``_can_cast``, for arrays."""
    return {stored.kind, dtype.kind} <= set("biufc") and np.can_cast(stored, dtype, "same_kind")


def _assign(value: np.ndarray[Any, Any], made: Any) -> Any:
    """The live array with new elements; the new one where the live one may not be written."""
    if not value.flags.writeable:
        return made
    value[...] = made
    return value


def _is_filled_in_place(value: Any) -> bool:
    """Whether a live value is filled in place rather than replaced."""
    torch = lazy_torch.torch_or_none()
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return isinstance(value, np.ndarray | dict | list | tuple) or modules.is_stateful(value)
