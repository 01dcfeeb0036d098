"""What was read from another's checkpoint, as the state of a snapshot: where it hangs, what its
members are called, and after which step it was saved."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.state.modules import EXTRA_STATE

STEP_KEYS = ("global_step", "step", "iteration", "iter_num")
"""What training loops call the step at the top of a checkpoint; the first that is there counts."""

MODEL_KEY = "model"
MAX_STEP = 10**18

_STEP_PATTERN = re.compile(
    r"(?<![a-z])(?:global[-_]?step|step|checkpoint|ckpt|iter(?:ation)?)s?[-_=]?([0-9]{1,18})(?![0-9])",
    re.IGNORECASE,
)
_WRAPPER_LEVELS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(slots=True)
class ArrangedState:
    """A state to be saved. ``renamed``: where wrappers' marks were taken out of names, by the path
    of the dict; ``converted``: the paths of optimizers whose state is now keyed by names."""

    state: dict[Any, Any]
    renamed: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)


def step_from_name(name: str) -> int | None:
    """The step that a file's or folder's name tells: ``step_1000``, ``checkpoint-1000``,
    ``global_step1000``, ``epoch=3-step=1000.ckpt``; None if it tells none, or two."""
    found = {int(m[1]) for m in _STEP_PATTERN.finditer(name)}
    return found.pop() if len(found) == 1 else None


def step_from_state(value: Any) -> int | None:
    """The step that stands at the top of a state, as an integer or a tensor of one."""
    if not isinstance(value, dict):
        return None
    for name in STEP_KEYS:
        found: Any = value.get(name)
        if getattr(found, "shape", None) == () and not found.dtype.is_floating_point:
            found = found.item()
        if type(found) is int and 0 <= found < MAX_STEP:
            return found
    return None


def arrange_state(value: Any, root_key: str | None, *, keep_names: bool = False) -> ArrangedState:
    """The state of what was read.

    A dict of dicts, such as ``{"model": ..., "optimizer": ...}``, stands as it is; all else, such
    as ``model.state_dict()``, is put under ``model``. ``under``: put it under that name whatever it
    is. In state dicts of modules the marks of wrappers (DDP, ``torch.compile``, FSDP) are taken out
    of the names, unless ``keep_names``: Holdfast keeps none. The state of an optimizer that names
    its parameters becomes keyed by their qualified names, as Holdfast has it.
    """
    if root_key is None and isinstance(value, dict) and not is_module_state_dict(value):
        made = ArrangedState(dict(value))
    else:
        made = ArrangedState({root_key or MODEL_KEY: value})
    if not keep_names:
        made.state = {k: _unwrap_state(v, str(k), made.renamed) for k, v in made.state.items()}
    _convert_optimizers(made)
    return made


def is_module_state_dict(value: Any) -> bool:
    """Whether a dict is like a module's ``state_dict()``: tensors by name, extra state perhaps."""
    return isinstance(value, dict) and all(
        type(k) is str and (hasattr(v, "dtype") or k.rpartition(".")[2] == EXTRA_STATE)
        for k, v in value.items()
    )


# -- names of wrapped modules --------------------------------------------------------------------


def _unwrap_state(value: Any, path: str, renamed: list[str], depth: int = 0) -> Any:
    """A value in which the state dicts of modules have plain names."""
    if not isinstance(value, dict) or depth > 3 or not value:
        return value
    if not is_module_state_dict(value):
        made = {k: _unwrap_state(v, f"{path}/{k}", renamed, depth + 1) for k, v in value.items()}
        return value if all(made[k] is v for k, v in value.items()) else type(value)(made)
    names = unwrap_names(list(value))
    if names == list(value) or len(set(names)) < len(names):
        return value
    renamed.append(path)
    made = OrderedDict(zip(names, value.values(), strict=True))
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, Mapping) and all(type(k) is str for k in versions):
        # the wrapper's own entry comes before that of what it wraps, which then takes its place
        plain = zip(_unwrap_module_paths(list(versions), value), versions.values(), strict=True)
        made._metadata = OrderedDict(plain)  # type: ignore[attr-defined]
    return made


def unwrap_names(names: Sequence[str]) -> list[str]:
    """Names of a state dict without the marks of wrappers. ``module.`` goes if all begin with it:
    that is what ``DistributedDataParallel`` and ``DataParallel`` do."""
    cut = len("module.") if all(n.startswith("module.") for n in names) else 0
    return [_remove_wrapper_levels(n[cut:]) for n in names]


def _unwrap_module_paths(paths: list[str], names: Mapping[str, Any]) -> list[str]:
    wrapped = all(n.startswith("module.") for n in names)
    cut = [p.removeprefix("module").removeprefix(".") if wrapped else p for p in paths]
    return [_remove_wrapper_levels(p) for p in cut]


def _remove_wrapper_levels(name: str) -> str:
    return ".".join(level for level in name.split(".") if level not in _WRAPPER_LEVELS)


# -- optimizers ----------------------------------------------------------------------------------


def _convert_optimizers(arranged: ArrangedState) -> None:
    """Key every optimizer at the top of the state by qualified names, where these are known and one
    module alone has them."""
    modules = {
        k: v for k, v in arranged.state.items() if type(k) is str and is_module_state_dict(v) and v
    }
    for name, value in arranged.state.items():
        named = _convert_optimizer(value, modules)
        if named is not None:
            arranged.state[name] = named
            arranged.converted.append(str(name))


def _convert_optimizer(value: Any, modules: Mapping[str, Any]) -> dict[str, Any] | None:
    """``optimizer.state_dict()`` in the form of ``live.optimizer_state``; None if it is none, or
    does not name its parameters.

    PyTorch names them by integers in the order of ``model.parameters()``, which no checkpoint
    says; but since 2.6 an optimizer made from ``named_parameters()`` keeps ``param_names``, and
    ``get_optimizer_state_dict`` of torch.distributed puts names in the integers' place.
    """
    if not isinstance(value, dict) or value.keys() - {"state"} != {"param_groups"}:
        return None
    groups, state = value["param_groups"], value.get("state", {})
    if not _is_param_groups(groups) or not isinstance(state, dict):
        return None
    names: dict[Any, str] = {}
    for group in groups:
        named = group.get("param_names", group["params"])
        if len(named) != len(group["params"]) or not all(type(n) is str for n in named):
            return None
        names.update(zip(group["params"], named, strict=True))
    plain = dict(zip(names, unwrap_names(list(names.values())), strict=True))
    owners = [m for m, state in modules.items() if set(plain.values()) <= state.keys()]
    if MODEL_KEY in owners:
        owners = [MODEL_KEY]
    if len(owners) != 1 or len(set(plain.values())) < sum(len(g["params"]) for g in groups):
        return None
    known = {str(k): f"{owners[0]}.{n}" for k, n in plain.items()}  # DCP makes text of all keys
    if not all(str(k) in known and isinstance(v, dict) for k, v in state.items()):
        return None
    return {
        "state": {known[str(k)]: dict(slots) for k, slots in state.items()},
        "groups": [
            {k: v for k, v in g.items() if k not in ("params", "param_names")}
            | {"params": [known[str(p)] for p in g["params"]]}
            for g in groups
        ],
    }


def _is_param_groups(groups: Any) -> bool:
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        and all(type(p) in (int, str) for g in groups for p in g["params"])
        and all(isinstance(g.get("param_names", []), list) for g in groups)
    )
