"""Loading a module: its own parameters and buffers in place, all else by ``load_state_dict``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.engine.planning.select import ABSENT
from holdfast.engine.state import modules, sharding
from holdfast.format.names import escape, join

if TYPE_CHECKING:
    from holdfast.engine.loading.binder import Binder
    from holdfast.engine.loading.targets import Settle


def bind_module(binder: Binder, module: Any, node: Any, key: str) -> Settle:
    """Bind every member of the module's state dict.

    Whatever is not the memory of a parameter or buffer (extra state, what a hook made, lazy
    parameters) goes through the module's own code, and so does everything where the module has
    code that wants to know of a load.
    """
    members = binder.members(module, node, key)
    if members is None:
        return lambda: module
    state = module.state_dict()
    own = {_memory(t) for t in [*module.parameters(), *module.buffers()] if _is_dense(t)}
    given: dict[str, Settle] = {}
    for raw, plain in zip(state, modules.plain_names(module, list(state), key), strict=True):
        value = state[raw]
        child, k = members.pop(plain, (ABSENT, join(key, escape(plain))))
        if not binder.selected(k):
            continue
        if child is ABSENT:
            binder.differences.missing.append(k)
        elif not _is_dense(value) or raw.rpartition(".")[2] == modules.EXTRA_STATE:
            given[raw] = binder.room.make(child, k)
        elif (source := binder.tensor_source(value, child, k)) is None:
            continue
        elif value.numel() == 0 or _memory(value) in own:
            binder.into_tensor(value, source, k)
        else:
            given[raw] = binder.room.make(child, k)
    binder.unexpected(members)

    def settle() -> Any:
        if given or _has_code(module):
            state.update({raw: make() for raw, make in given.items()})
            module.load_state_dict(state)
        return module

    return settle


def _memory(value: Any) -> object:
    """What a tensor's memory is known by: its address, or the storage of what this rank has."""
    parts = sharding.parts(value, "")
    return value.data_ptr() if parts is None else parts.storage


def _is_dense(value: Any) -> bool:
    """Whether it is a tensor with memory that bytes can be written to."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and value.layout is torch.strided
    )


def _has_code(module: Any) -> bool:
    """Whether code of the user's runs when the module's state is loaded: hooks, or methods that
    replace PyTorch's. Those of PyTorch's own layers only look at old versions of their state."""
    import torch

    def replaced(m: Any) -> bool:
        return not type(m)._load_from_state_dict.__module__.startswith("torch.nn.modules.")

    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks or replaced(m)
        for m in module.modules()
    )
