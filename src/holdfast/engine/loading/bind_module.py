"""Loading a module: its own parameters and buffers in place, all else by ``load_state_dict``."""

from __future__ import annotations

from typing import Any

from holdfast.engine.loading.binding import Binding
from holdfast.engine.loading.targets import Finalize
from holdfast.engine.planning.select import ABSENT
from holdfast.engine.state import modules, sharding
from holdfast.format.names import escape_level, join_key


def bind_module(binding: Binding, module: Any, node: Any, key: str) -> Finalize:
    """Bind every member of the module's state dict.

    Whatever is not the memory of a parameter or buffer (extra state, what a hook made, lazy
    parameters) goes through the module's own code, and so does everything where the module has
    code that wants to know of a load.
    """
    members = binding.dict_members(module, node, key)
    if members is None:
        return lambda: module
    state = module.state_dict()
    own = {_memory_key(t) for t in [*module.parameters(), *module.buffers()] if _is_dense(t)}
    given: dict[str, Finalize] = {}
    for raw, plain in zip(
        state, modules.strip_wrapper_names(module, list(state), key), strict=True
    ):
        value = state[raw]
        child, k = members.pop(plain, (ABSENT, join_key(key, escape_level(plain))))
        if not binding.selected(k):
            continue
        if child is ABSENT:
            binding.differences.missing.append(k)
        elif not _is_dense(value) or raw.rpartition(".")[2] == modules.EXTRA_STATE:
            given[raw] = binding.targets.add_fresh(child, k)
        elif (source := binding.tensor_source(value, child, k)) is None:
            continue
        elif value.numel() == 0 or _memory_key(value) in own:
            binding.add_tensor(value, source, k)
        else:
            given[raw] = binding.targets.add_fresh(child, k)
    binding.note_unexpected(members)

    def settle() -> Any:
        if given or _has_custom_load(module):
            state.update({raw: make() for raw, make in given.items()})
            module.load_state_dict(state)
        return module

    return settle


def _memory_key(value: Any) -> object:
    """What a tensor's memory is known by: its address, or the storage of what this rank has."""
    parts = sharding.get_local_boxes(value, "")
    return value.data_ptr() if parts is None else parts.tie_key


def _is_dense(value: Any) -> bool:
    """Whether it is a tensor with memory that bytes can be written to."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and value.layout is torch.strided
    )


def _has_custom_load(module: Any) -> bool:
    """Whether code of the user's runs when the module's state is loaded: hooks, or methods that
    replace PyTorch's. Those of PyTorch's own layers only look at old versions of their state."""
    import torch

    def replaced(m: Any) -> bool:
        return not type(m)._load_from_state_dict.__module__.startswith("torch.nn.modules.")

    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks or replaced(m)
        for m in module.modules()
    )
