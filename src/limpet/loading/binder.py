"""Binding: find the target of each leaf, in the live objects or in fresh memory.

It compares a snapshot's tree with the live state and collects every difference, before anything in
the live state changes. Each binding returns a ``Finalize`` function that sets values and calls
``load_state_dict`` after the bytes are read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from limpet.errors import LimpetError
from limpet.format import tree
from limpet.format.names import join_key
from limpet.format.numpy_dtypes import from_descr
from limpet.format.rejected import nested_too_deeply, unsupported
from limpet.layout.select import ABSENT
from limpet.lazy_torch import torch_or_none
from limpet.loading.bind_optimizer import bind_optimizer, bind_own_optimizer
from limpet.loading.bind_stateful import bind_stateful
from limpet.loading.binding import STATE_INVALID, Binding
from limpet.loading.targets import Finalize
from limpet.state import modules, optimizers
from limpet.state.arrays import library_of, part_library
from limpet.state.modules import UNCHANGED, calling
from limpet.state.replication import PerRank, Replicated, keeps_per_rank
from limpet.state.streamed import Streamed
from limpet.state.walk import IMMUTABLE_TYPES, as_dict
from limpet.types import DTYPES, Box

if torch_or_none() is not None:
    import_module("limpet.loading.bind_module")  # now, because a step must not import anything

_NON_VALUE_TAGS = frozenset(
    {"tensor", "array", "tied", "sparse", "dict", "ordered", "items", "list", "tuple"}
)

_CONTAINER_TAGS: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((dict, OrderedDict, Counter), ("dict", "ordered", "items")),
    **dict.fromkeys((list, tuple), ("list", "tuple")),
}


def bind_state(binding: Binding, state: Mapping[str, Any], node: Any) -> Finalize:
    """Bind a whole state. A mapping other than a dict is assigned what was not filled in place."""
    members = as_dict(state)
    finalize_members = bind(binding, members, node, "")

    def finalize() -> Any:
        for name, value in finalize_members().items():
            if members is not state and state[name] is not value:
                state[name] = value  # type: ignore[index]  # see ``check_replaceable``
        return state

    return finalize


def bind(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind a live value to a node. Returns a function to call after the bytes are read, which
    returns the value for the live state: the live object, if it could be filled in place."""
    # arrays first: there are many of them, and attribute lookups on tensors are slow
    if library_of(type(value)) is not None:
        return _bind_leaf(binding, value, node, key)
    if isinstance(value, dict) and (type(value) is dict or not modules.is_stateful(value)):
        return _bind_container(binding, value, node, key)
    if type(value) in (list, tuple):
        return _bind_container(binding, value, node, key)
    if isinstance(value, Replicated):
        return _bind_wrapped(binding, value, node, key)
    if isinstance(value, Streamed):
        return _bind_streamed(binding, value, node, key)
    if keeps_per_rank(value) and not binding.inside_wrapper:
        return _bind_per_rank(binding, value, node, key)
    if modules.is_module(value):
        from limpet.loading.bind_module import bind_module  # which imports torch

        return bind_module(binding, value, node, key)
    has_inner = tree.tag_of(node) == "dict" and optimizers.INNER in node["dict"]
    if has_inner and optimizers.has_groups(value):
        return _bind_with_inner(binding, value, node, key)
    if optimizers.is_standard_optimizer(value):
        return bind_optimizer(binding, value, node, key)
    if modules.is_stateful(value):
        is_optimizer = optimizers.has_groups(value)
        bind_object = bind_own_optimizer if is_optimizer else bind_stateful
        return bind_object(binding, value, node, key)
    return _bind_leaf(binding, value, node, key)


def _bind_streamed(binding: Binding, value: Streamed, node: Any, key: str) -> Finalize:
    """Compare what is plain. The member itself reads the rest, in the order of the state."""
    if node is ABSENT:
        binding.note_missing(key)
    if node is ABSENT or binding.targets.is_dry or not binding.is_any_selected(node, key):
        return lambda: value
    is_renamed = any(f"{new}/".startswith(f"{key}/") for new in binding.leniency.rename.values())
    if is_renamed or not all(binding.selected(k) for k, _ in tree.walk(node, key)):
        raise LimpetError(f"keys= and rename= must leave {key!r} whole, and as it was saved")
    if binding.dict_members(value, node, key) is None:
        return lambda: value
    with calling(value, key, "differences", f"Nothing was loaded. {UNCHANGED}"):
        found = value.differences(tree.decode(node, key, lambda node, key: None))
    binding.differences.kinds |= {join_key(key, name): text for name, text in found.items()}

    def restore() -> Any:
        with calling(value, key, "restore", STATE_INVALID, live_state="not valid"):
            value.restore(binding.targets.snapshot, key)
        return value

    return restore


def _bind_with_inner(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind an optimizer, and the optimizers that it has as attributes."""
    rest = {"dict": {k: v for k, v in node["dict"].items() if k != optimizers.INNER}}
    finalizers = [bind(binding, value, rest, key)]
    inner = node["dict"][optimizers.INNER]
    for name, child, k in tree.children(inner, join_key(key, optimizers.INNER)):
        if optimizers.has_groups(live := getattr(value, str(name), None)):
            finalizers.append(bind(binding, live, child, k))
        else:
            binding.note_unexpected([(child, k)])

    def finalize() -> Any:
        for finalize_each in finalizers:
            finalize_each()
        return value

    return finalize


def _bind_leaf(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind an array, or replace a plain value by the saved one, which is of any kind if the live
    one is None, if it is selected and the snapshot has it."""
    if node is ABSENT:
        binding.note_missing(key)
    if node is ABSENT or not binding.selected(key):
        return lambda: value
    if library_of(type(value)) is not None:
        return _bind_array(binding, value, node, key)
    if value is not None and tree.tag_of(node) in _NON_VALUE_TAGS:
        binding.note_other_kind(type(value).__name__, node, key)
        return lambda: value
    return binding.targets.add_fresh(node, key)


# -- containers --------------------------------------------------------------------------------


def _bind_container(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind a container. Raises ``Unsupported`` if no save accepts one that is so deep."""
    binding.depth += 1
    if binding.depth > tree.MAX_DEPTH + 1:
        why = f"it is nested deeper than {tree.MAX_DEPTH} levels, or contains itself"
        raise nested_too_deeply(value, key, why)
    try:
        bind_members = _bind_dict if isinstance(value, dict) else _bind_sequence
        return bind_members(binding, value, node, key)
    finally:
        binding.depth -= 1


def _bind_dict(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    members = binding.dict_members(value, node, key)
    if members is None:
        return lambda: value
    try:
        live_keys = tree.child_keys(list(value), key)
    except ValueError as e:
        raise unsupported(value, key, f"a key cannot be converted to text: {e}") from e
    # below the top level, a dict of plain values takes the members of the snapshot, in their order
    is_plain = key != "" and node is not ABSENT and _is_plain(value)
    if is_plain and binding.targets.is_dry:
        return lambda: value
    bind_member = _bind_plain if is_plain else bind
    finalizers: dict[Any, Finalize] = {}
    live, selected = dict(zip(value, live_keys, strict=True)), binding.selected
    for name in {**members, **live} if is_plain else live:
        # prefer the snapshot's key, which is unique even if two names have the same text
        child, k = members.pop(name, None) or (ABSENT, live[name])
        if name not in live:
            if binding.takes(child, k):
                finalizers[name] = binding.targets.add_fresh(child, k)
        elif not is_plain or child is not ABSENT or binding.keeps_missing(k) or not selected(k):
            finalizers[name] = bind_member(binding, value[name], child, k)
    binding.note_unexpected(members.values())

    def finalize() -> Any:
        loaded = {name: finalize_member() for name, finalize_member in finalizers.items()}
        if is_plain:
            value.clear()
        value.update(loaded)
        return value

    return finalize


def _bind_plain(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind a member of a container of plain values: in place if it is a container, as the saved
    one is. Otherwise, it takes the saved value, of whatever kind."""
    tags = _CONTAINER_TAGS.get(type(value), ())
    if node is ABSENT or tree.tag_of(node) in tags or not binding.is_any_selected(node, key):
        return bind(binding, value, node, key)
    return binding.targets.add_fresh(node, key)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return True for a value that is not filled in place, and a container that has only those."""
    if type(value) in IMMUTABLE_TYPES:
        return True
    if type(value) in _CONTAINER_TAGS and depth <= tree.MAX_DEPTH:
        members = value.values() if isinstance(value, dict) else value
        return all(_is_plain(member, depth + 1) for member in members)
    is_container = isinstance(value, dict | list | tuple)
    is_wrapped = isinstance(value, PerRank | Replicated)
    is_filled = is_wrapped or library_of(type(value)) is not None or modules.is_stateful(value)
    return not (is_container or is_filled)


def _bind_sequence(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    tag = tree.tag_of(node)
    if tag not in ("list", "tuple") and node is not ABSENT:
        binding.note_other_kind(type(value).__name__, node, key)
        return lambda: value
    nodes = () if node is ABSENT else node[tag]
    is_plain = node is not ABSENT and _is_plain(value)
    if is_plain and binding.targets.is_dry:
        return lambda: value
    if is_plain and len(nodes) != len(value):
        # a list of plain values, such as a history, takes its saved length
        if not binding.is_any_selected(node, key):
            return lambda: value
        finalize_fresh = binding.targets.add_fresh(node, key)
        return lambda: _assign_elements(value, finalize_fresh())
    bind_member = _bind_plain if is_plain else bind
    finalizers = [
        bind_member(binding, v, nodes[i] if i < len(nodes) else ABSENT, join_key(key, str(i)))
        for i, v in enumerate(value)
    ]
    surplus = enumerate(nodes[len(value) :], len(value))
    binding.note_unexpected((n, join_key(key, str(i))) for i, n in surplus)
    return lambda: _assign_elements(value, type(value)(f() for f in finalizers))


# -- leaves ------------------------------------------------------------------------------------


def _bind_array(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    tag, library = tree.tag_of(node), part_library(type(value))
    kind, dtype = library.describe(value)
    if "subclass" in (tag, kind):
        return binding.bind_subclass(value, node, key)
    if tag == "sparse" and library.tag == "tensor":
        return _bind_sparse(binding, value, node, key)
    source = binding.array_source(value, node, key)
    if source is None:
        return lambda: value
    body = binding.targets.snapshot.nodes()[source].get("array", (dtype,))
    stored = body[0] if len(body) < 3 else str(from_descr(body[2]))
    if stored == dtype or {stored, dtype} <= DTYPES.keys():
        return binding.add_array(value, source, key)
    finalize = binding.targets.add_fresh(node, key)  # one of both is saved as rows of bytes
    return lambda: library.loaded(value, [(Box.whole(tuple(value.shape)), finalize())])


def _bind_sparse(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Replace a sparse tensor, because the saved one may have another number of elements."""
    body, library = node["sparse"], part_library(type(value))
    kind, live = library.describe(value)
    source = binding.targets.resolve_leaf(body["parts"]["values"], join_key(key, "values"))[0]
    stored = binding.targets.snapshot.leaves[source][0]
    if kind != f"tensor {body['layout']}":
        binding.note_other_kind(kind, node, key)
    elif list(value.shape) != body["shape"] or key in binding.resized:
        binding.note_resized(None, key, body["shape"], value.shape)
        return lambda: value
    elif stored != live:
        binding.note_other_dtype(key, stored, live, can_cast=False)
    return binding.targets.add_fresh(node, key, value.device)


# -- values of ranks ---------------------------------------------------------------------------


def _bind_wrapped(
    binding: Binding, value: PerRank[Any] | Replicated[Any], node: Any, key: str
) -> Finalize:
    """Bind the wrapped value. Values within a wrapper are not treated as per-rank again."""
    outer, binding.inside_wrapper = binding.inside_wrapper, True
    try:
        finalize_inner = bind(binding, value.value, node, key)
    finally:
        binding.inside_wrapper = outer

    def finalize() -> Any:
        value.value = finalize_inner()
        return value

    return finalize


def _bind_per_rank(binding: Binding, value: Any, node: Any, key: str) -> Finalize:
    """Bind this rank's own saved value. Without one, it keeps its value or, if that has ``derive``,
    derives one from that of the lowest saved rank."""
    saved = _nodes_by_rank(binding, node, key)
    if not saved:
        return bind_stateful(binding, value, ABSENT, key)
    has_own, can_derive = binding.rank in saved, hasattr(value, "derive")
    if not can_derive and binding.is_any_selected(node, key):
        binding.differences.saved_ranks[key] = sorted(saved)
    if not has_own and not can_derive:
        return lambda: value
    child, child_key = saved[binding.rank if has_own else min(saved)]
    if isinstance(value, PerRank):
        finalize_child = _bind_wrapped(binding, value, child, child_key)
    else:
        finalize_child = bind_stateful(binding, value, child, child_key)

    def derive() -> Any:
        finalize_child()
        with calling(value, key, "derive", STATE_INVALID, live_state="not valid"):
            value.derive(binding.rank)
        return value

    return finalize_child if has_own else derive


def _nodes_by_rank(binding: Binding, node: Any, key: str) -> dict[int, tuple[Any, str]]:
    """Return the node and key of each rank; a value saved without ranks is that of rank 0."""
    members = binding.dict_members({}, node, key) or {}
    if members and all(type(name) is str and name.isdecimal() for name in members):
        return {int(name): member for name, member in members.items()}
    return {0: (node, key)} if members else {}


def _assign_elements(value: Any, loaded: Any) -> Any:
    """Replace a live list's elements and return it; of a tuple, return what was loaded."""
    if type(value) is tuple:
        return loaded
    value[:] = loaded
    return value
