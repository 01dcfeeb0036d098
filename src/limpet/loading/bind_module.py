"""Load a module: fill its parameters and buffers in place, and pass everything else to its
``load_state_dict``."""

from __future__ import annotations

import copy
from typing import Any

from limpet.format.names import escape_level, join_key
from limpet.layout.select import ABSENT
from limpet.loading.binding import STATE_INVALID, Binding
from limpet.loading.targets import Finalize
from limpet.state import composites, modules
from limpet.state.arrays import part_library


def bind_module(binding: Binding, module: Any, node: Any, key: str) -> Finalize:
    """Bind every member of the module's state dict. The module's code loads what is not the memory
    of a parameter or buffer (extra state, lazy parameters); custom code loads every member."""
    members = binding.dict_members(module, node, key)
    if members is None:
        return lambda: module
    with modules.calling(module, key, "state_dict", f"Nothing was loaded. {modules.UNCHANGED}"):
        state = module.state_dict()
    live = dict(module.named_parameters(remove_duplicate=False))
    live.update(module.named_buffers(remove_duplicate=False))
    in_place = {
        _memory_key(t, join_key(key, escape_level(name)))
        for name, t in live.items()
        if _is_dense(t)
    }
    fresh: dict[str, Finalize] = {}
    absent: dict[str, Any] = {}
    plain_names = modules.strip_wrapper_names(module, list(state), key)
    for (name, value), plain_name in zip(state.items(), plain_names, strict=True):
        child, k = members.pop(plain_name, (ABSENT, join_key(key, escape_level(plain_name))))
        if not binding.selected(k):
            if child is not ABSENT and _is_dense(value):
                binding.note_unselected(value, child, k)
        elif child is ABSENT:
            absent[k] = value if name in live and _is_dense(value) else None
        elif name in live and composites.is_subclass(live[name]):
            # the member itself: its alias in the state dict may have copies of inner tensors
            binding.bind_subclass(live[name], child, k)
        elif not _is_dense(value) or name.rpartition(".")[2] == modules.EXTRA_STATE:
            fresh[name] = binding.targets.add_fresh(child, k)
        elif _is_resized_by_load(binding, module, name, value, child, k):
            fresh[name] = binding.targets.add_fresh(child, k, value.device)
        elif (source := binding.array_source(value, *_describe(value), child, k)) is None:
            continue
        elif value.numel() == 0 or _memory_key(value, k) in in_place:
            binding.add_array(value, source, k)
        else:
            fresh[name] = binding.targets.add_fresh(child, k)
    # of tied parameters, some libraries save only one name
    binding.differences.missing += [k for k, v in absent.items() if not binding.is_filled(v)]
    binding.note_unexpected(members.values())
    binding.differences.modules.append(key)

    def finalize() -> Any:
        if fresh or _has_custom_load(module):
            state.update({name: finalize_value() for name, finalize_value in fresh.items()})
            with modules.calling(
                module, key, "load_state_dict", STATE_INVALID, live_state="not valid"
            ):
                module.load_state_dict(state)
        return module

    return finalize


def _is_resized_by_load(
    binding: Binding, module: Any, name: str, value: Any, node: Any, key: str
) -> bool:
    """Return True if the module's own code for loading gives this buffer its saved shape, as the
    observers of quantization-aware training do. A copy of the submodule tries it."""
    source = binding.leaf_source(node, key, "tensor")
    stored, shape = ("", ()) if source is None else binding.targets.snapshot.leaves[source]
    if shape == tuple(value.shape) or stored != _describe(value)[1]:
        return False
    path, _, member = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # a state_dict hook made the name
        return False
    if member not in owner._buffers or not _has_own_load(owner):
        return False
    trial, errors = copy.deepcopy(owner), list[str]()
    state: dict[str, Any] = {}
    trial._save_to_state_dict(state, "", False)
    state[member] = value.new_zeros(shape)
    try:
        trial._load_from_state_dict(state, "", {"version": owner._version}, True, [], [], errors)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError):  # fmt: skip
        return False
    return not errors and tuple(getattr(trial, member).shape) == shape


def _describe(value: Any) -> tuple[str, str]:
    return part_library(type(value)).describe(value)


def _memory_key(value: Any, key: str) -> object:
    """Return a key that identifies a tensor's memory: its address, or for a distributed tensor the
    storage of the boxes that this rank has."""
    return part_library(type(value)).local_boxes(value, key).tie_key


def _is_dense(value: Any) -> bool:
    """Return True for a tensor with memory that bytes can be written to."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and value.layout is torch.strided
        and not composites.is_subclass(value)
    )


def _has_custom_load(module: Any) -> bool:
    """Return True if user code runs when the module is loaded: hooks, or overrides other than those
    in PyTorch's own layers, which only handle old versions of their state."""
    import torch

    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks or _has_own_load(m)
        for m in module.modules()
    )


def _has_own_load(sub: Any) -> bool:
    """Return True if a submodule overrides how its own members are loaded."""
    return not type(sub)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
