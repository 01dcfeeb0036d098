"""Walks over the containers of a state: find and copy members, and the memory that they use.

*Stable* is the memory of parameters and slots that does not change between two optimizer steps.
Forward and backward passes may change everything else: buffers, scales of FP8, plain tensors,
random generators, and embeddings with ``max_norm``. A parameter that shares its storage with a
buffer is not stable.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any

from limpet import lazy_torch
from limpet.errors import LimpetError
from limpet.format.tree import MAX_DEPTH, child_keys
from limpet.text import MAX_SHOWN, format_list, with_article

if TYPE_CHECKING:
    import torch

Memo = dict[int, tuple[Any, Any]]
"""By ``id``: an object that a walk visited, alive so that no id is reused, and its result."""

IMMUTABLE_TYPES = frozenset({str, int, float, bool, complex, bytes, type(None)})


def as_dict(state: Any) -> Any:
    """Return the members of a mapping as a plain dict; anything else as it is."""
    return dict(state) if type(state) is not dict and isinstance(state, Mapping) else state


def check_replaceable(name: str, state: Mapping[str, Any]) -> None:
    """Raise ``LimpetError`` if a load would replace members of a mapping that is read-only."""
    read_only = () if hasattr(state, "__setitem__") else state.items()
    if plain := [str(key) for key, value in read_only if type(value) in {*IMMUTABLE_TYPES, tuple}]:
        raise LimpetError(
            f"{name} is {with_article(type(state).__name__)}, which is read-only, so that a load"
            f" could not replace the plain values of {format_list(plain, MAX_SHOWN)}: pass a dict"
        )


def optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in the containers of a state, each once."""
    torch = lazy_torch.torch_or_none()
    return [] if torch is None else list(find_instances(state, torch.optim.Optimizer))


def modules_in(state: Any) -> list[torch.nn.Module]:
    """Return the modules in the containers of a state, each once, without their submodules."""
    torch = lazy_torch.torch_or_none()
    return [] if torch is None else list(find_instances(state, torch.nn.Module))


def parameters_and_slots(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [*chain.from_iterable(chain(parameters_of(o), slots_of(o)) for o in optimizers)]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def slots_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the tensors in an optimizer's slots, including those in nested lists and dicts."""
    torch: Any = lazy_torch.torch_or_none()
    per_parameter = optimizer.state.values()
    if {*map(type, per_parameter)} <= {dict}:  # the common case, and fast to check
        slots = [*chain.from_iterable(map(dict.values, per_parameter))]
        if {*map(type, slots)} <= {torch.Tensor}:
            return slots
    return find_instances([*per_parameter], torch.Tensor)


def find_stable_leaves(state: dict[str, Any], leaves: Iterable[Any]) -> set[str]:
    """Return the keys of the ``LocalLeaf``s of a state that are unchanged until an optimizer in it
    steps, without those that have no elements or that ``flatten`` had to copy."""
    torch = lazy_torch.torch_or_none()
    if torch is None:
        return set()
    stable = find_stable_storages(parameters_and_slots(optimizers_in(state)), modules_in(state))
    return {
        leaf.key
        for leaf in leaves
        if isinstance(leaf.source, torch.Tensor) and storage_address(leaf.source) in stable
    }


def find_stable_storages(
    tensors: Iterable[torch.Tensor], modules: Sequence[torch.nn.Module]
) -> frozenset[int]:
    """Return the storage addresses of the tensors whose memory only an optimizer step changes: not
    what a forward pass may, nor inference tensors, whose changes PyTorch does not count."""
    mutable_storages = {0}
    for sub in (sub for module in modules for sub in module.modules()):
        mutable_storages.update(storage_address(b) for b in sub._buffers.values() if b is not None)
        if getattr(sub, "max_norm", None) is not None:
            mutable_storages.update(storage_address(p) for p in sub.parameters(recurse=False))
    return frozenset(
        address
        for t in tensors
        if (address := storage_address(t)) not in mutable_storages and not t.is_inference()
    )


def storage_address(t: torch.Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if its memory has no address."""
    try:
        return to_local(t).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0  # sparse, a wrapper subclass, or not materialized: never treated as stable


def to_local(t: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    local: torch.Tensor = getattr(t, "_local_tensor", t)
    return local


def find_instances(value: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield the instances of ``kind`` in nested dicts, lists, and tuples, each object once."""
    return (instance for _, instance in find_named_instances(value, kind, named=False))


def find_named_instances(
    value: Any, kind: type[Any], named: bool = True, separator: str = "."
) -> Iterator[tuple[str, Any]]:
    """Yield the instances of ``kind`` as ``find_instances`` does, each with its first path, whose
    levels ``separator`` joins: ``"."`` as in names of parameters, or ``"/"`` as in keys."""
    seen: dict[int, Any] = {}  # the values stay alive, so that no id is reused

    def walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, kind):
            yield path, value
        elif isinstance(value, dict | list | tuple) and depth < MAX_DEPTH:
            members = list(value.values() if isinstance(value, dict) else value)
            nested = [i for i, m in enumerate(members) if isinstance(m, (kind, dict, list, tuple))]
            names: Sequence[str] = ()
            if named and nested:
                try:
                    levels = value if isinstance(value, dict) else range(len(value))
                    names = child_keys(list(levels), "")
                except ValueError:  # an integer key too long for text; flatten rejects it
                    return
            for i in nested:
                level = names[i] if named else ""
                yield from walk(
                    members[i], f"{path}{separator}{level}" if path else level, depth + 1
                )

    return walk(value if isinstance(value, kind) else as_dict(value), "", 0)


def map_containers(
    value: Any, map_value: Callable[[Any, int], Any], memo: Memo, depth: int = 0
) -> Any:
    """Copy nested dicts, lists, and tuples, and pass every other value through ``map_value``. An
    object that occurs again, also inside itself, gets the same result."""
    cls = type(value)
    if depth > 2 * MAX_DEPTH:  # ``flatten`` reports it later
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    # a copy keeps the attributes that PyTorch sets on a state dict; ``value`` itself is the result
    # for an object whose state contains itself, which flatten rejects
    mapped: Any = copy(value) if cls in (dict, OrderedDict, Counter, list) else value
    memo[id(value)] = value, mapped
    if cls in (list, tuple):
        members = [
            m if type(m) in IMMUTABLE_TYPES else map_containers(m, map_value, memo, depth + 1)
            for m in value
        ]
        if cls is tuple:
            mapped = tuple(members)
        else:
            mapped[:] = members
    elif mapped is value:
        mapped = map_value(value, depth)
    else:
        for name, member in value.items():
            if type(member) not in IMMUTABLE_TYPES:
                mapped[name] = map_containers(member, map_value, memo, depth + 1)
    memo[id(value)] = value, mapped
    return mapped
