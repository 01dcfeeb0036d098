"""Convert what was read from a foreign checkpoint to the state of a snapshot.

This module decides the position in the state, the names of the members, and the step. Each library
names or numbers the members of a training in its own way. In the snapshot, they are ``model``,
``optimizer``, ``scheduler``, and ``scaler``, and the others of each kind ``model_1``, and so on.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limpet.format.names import MAX_STEP
from limpet.state.modules import EXTRA_STATE, WRAPPER_ATTRIBUTES

STEP_KEYS = ("global_step", "step", "iteration", "iter_num")
"""Names that training loops use for the step. The first one at the top level applies."""

MODEL_KEY = "model"
OPTIMIZER_KEY = "optimizer"

_STATE_SUFFIXES = ("_state_dict", "_state")
"""What names in a checkpoint have behind the name of the live member."""

_LIGHTNING_MEMBERS = {
    "state_dict": "model",
    "MixedPrecision": "scaler",
    "MixedPrecisionPlugin": "scaler",
    "native_amp_scaling_state": "scaler",
}
_LIGHTNING_LISTS = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler"}

_STEP_PATTERN = re.compile(
    r"(?<![a-z])(?:global[-_]?step|step|checkpoint|ckpt|iter(?:ation)?)s?[-_=]?([0-9]{1,18})(?![0-9])",
    re.IGNORECASE,
)


@dataclass(slots=True)
class ArrangedState:
    """A state to save. ``members``: new names of members, by those in the checkpoint; ``renamed``
    and ``converted``: paths of dicts without prefixes, and of optimizers now keyed by name."""

    state: dict[Any, Any]
    members: dict[str, str] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)


def step_from_name(name: str) -> int | None:
    """Return the one step in the name of a file or folder, else None: ``step_1000``,
    ``checkpoint-1000``, ``global_step1000``, ``epoch=3-step=1000.ckpt``."""
    steps = {int(m[1]) for m in _STEP_PATTERN.finditer(name)}
    return steps.pop() if len(steps) == 1 else None


def step_from_state(value: Any) -> int | None:
    """Return the step at the top level of a state, an integer or a scalar tensor, if any."""
    if not isinstance(value, dict):
        return None
    for name in STEP_KEYS:
        step: Any = value.get(name)
        if getattr(step, "shape", None) == () and not step.dtype.is_floating_point:
            step = step.item()
        if type(step) is int and 0 <= step <= MAX_STEP:
            return step
    return None


def arrange_state(
    value: Any, root_key: str | None, *, kind: str = "torch", keep_names: bool = False
) -> ArrangedState:
    """Return the state for a value from a foreign checkpoint of a kind (see ``ForeignCheckpoint``).

    A dict of dicts is kept, with members renamed as in this module's docstring. A bare state of an
    optimizer goes under ``optimizer``, anything else under ``model``, and all under a given
    ``root_key``. Wrapper prefixes are removed, unless ``keep_names``. Optimizer state that names
    its parameters is keyed by them; other keeps its numbers, which a load assigns in order.
    """
    is_optimizer = _is_optimizer_state_dict(value)
    is_bare = is_optimizer or not isinstance(value, dict) or is_module_state_dict(value)
    own_key = OPTIMIZER_KEY if is_optimizer else MODEL_KEY
    if root_key is not None or is_bare:
        arranged = ArrangedState({root_key or own_key: value})
    else:
        arranged = ArrangedState(dict(value))
        if not keep_names:
            _name_members(arranged, is_lightning=kind == "lightning")
    if not keep_names:
        arranged.state = {
            k: _unwrap_state(v, str(k), arranged.renamed) for k, v in arranged.state.items()
        }
    _convert_optimizers(arranged)
    return arranged


def _name_members(arranged: ArrangedState, *, is_lightning: bool) -> None:
    """Give the members at the top level of a state the names in the docstring of this module."""
    state: dict[Any, Any] = {}
    for name, value in arranged.state.items():
        new = name
        if is_lightning and name in _LIGHTNING_LISTS and isinstance(value, list) and value:
            names = [numbered_name(_LIGHTNING_LISTS[name], i) for i in range(len(value))]
            if arranged.state.keys().isdisjoint(names):
                state |= dict(zip(names, value, strict=True))
                arranged.members[name] = ", ".join(names)
                continue
        if is_lightning:
            new = _LIGHTNING_MEMBERS.get(name, name)
        elif isinstance(name, str) and isinstance(value, dict):
            suffix = next((s for s in _STATE_SUFFIXES if name.endswith(s)), "")
            new = name.removesuffix(suffix) or name
        if new != name and (new in arranged.state or new in state):
            new = name
        if new != name:
            arranged.members[name] = new
        state[new] = value
    arranged.state = state


def numbered_name(role: str, number: int) -> str:
    """Return the name of a member: ``optimizer``, ``optimizer_1``, ``optimizer_2``, ..."""
    return f"{role}_{number}" if number else role


def is_module_state_dict(value: Any) -> bool:
    """Return True if a value looks like a module's state dict: tensors by name, and extra state."""
    return isinstance(value, dict) and all(
        type(k) is str and (hasattr(v, "dtype") or k.rpartition(".")[2] == EXTRA_STATE)
        for k, v in value.items()
    )


# -- names of wrapped modules --------------------------------------------------------------------


def _unwrap_state(value: Any, path: str, renamed: list[str], depth: int = 0) -> Any:
    """Return a value whose module state dicts have names without wrapper prefixes."""
    if not isinstance(value, dict) or depth > 3 or not value:
        return value
    if not is_module_state_dict(value):
        members = {k: _unwrap_state(v, f"{path}/{k}", renamed, depth + 1) for k, v in value.items()}
        return value if all(members[k] is v for k, v in value.items()) else type(value)(members)
    names = unwrap_names(list(value))
    if names == list(value) or len(set(names)) < len(names):
        return value
    renamed.append(path)
    unwrapped = OrderedDict(zip(names, value.values(), strict=True))
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, Mapping) and all(type(k) is str for k in versions):
        # a wrapper and its module now have one path; the module comes later, so its entry is kept
        paths = list(versions)
        if all(n.startswith("module.") for n in value):
            paths = [p.removeprefix("module").removeprefix(".") for p in paths]
        plain = map(_remove_wrapper_levels, paths)
        metadata = OrderedDict(zip(plain, versions.values(), strict=True))
        unwrapped._metadata = metadata  # type: ignore[attr-defined]
    return unwrapped


def unwrap_names(names: Sequence[str]) -> list[str]:
    """Return names without prefixes of wrappers; ``module.`` (DDP) only if all begin with it."""
    start = len("module.") if all(n.startswith("module.") for n in names) else 0
    return [_remove_wrapper_levels(n[start:]) for n in names]


def _remove_wrapper_levels(name: str) -> str:
    return ".".join(level for level in name.split(".") if level not in WRAPPER_ATTRIBUTES)


# -- optimizers ----------------------------------------------------------------------------------


def _convert_optimizers(arranged: ArrangedState) -> None:
    """Key every optimizer at the top level by parameter name, if just one module has all names."""
    modules = {
        k: v for k, v in arranged.state.items() if type(k) is str and is_module_state_dict(v) and v
    }
    for name, value in arranged.state.items():
        converted = _convert_optimizer(value, modules)
        if converted is not None:
            arranged.state[name] = converted
            arranged.converted.append(str(name))
        elif _is_optimizer_state_dict(value):
            # DCP converts numbers to text, and does not save an empty dict
            saved = value.get("state", {}).items()
            slots = {int(k) if str(k).isdecimal() else k: v for k, v in saved}
            arranged.state[name] = {"state": slots, "param_groups": value["param_groups"]}


def _convert_optimizer(value: Any, modules: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert ``optimizer.state_dict()`` to Limpet's form, or return None without names: as PyTorch
    2.6 keeps ``param_names``, and ``get_optimizer_state_dict`` of torch.distributed uses names."""
    if not _is_optimizer_state_dict(value):
        return None
    groups, state = value["param_groups"], value.get("state", {})
    names: dict[Any, str] = {}
    for group in groups:
        group_names = group.get("param_names", group["params"])
        if len(group_names) != len(group["params"]) or not all(type(n) is str for n in group_names):
            return None
        names.update(zip(group["params"], group_names, strict=True))
    plain = dict(zip(names, unwrap_names(list(names.values())), strict=True))
    parameters = set(plain.values())
    owners = [m for m, state in modules.items() if parameters <= state.keys()]
    if MODEL_KEY in owners:
        owners = [MODEL_KEY]
    if len(owners) != 1 or len(parameters) < sum(len(g["params"]) for g in groups):
        return None
    # DCP converts all keys to text
    qualified = {str(k): f"{owners[0]}.{n}" for k, n in plain.items()}
    if not all(str(k) in qualified and isinstance(v, dict) for k, v in state.items()):
        return None
    return {
        "state": {qualified[str(k)]: dict(slots) for k, slots in state.items()},
        "groups": [
            {k: v for k, v in g.items() if k not in ("params", "param_names")}
            | {"params": [qualified[str(p)] for p in g["params"]]}
            for g in groups
        ],
    }


def _is_optimizer_state_dict(value: Any) -> bool:
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return (
        isinstance(groups, list)
        and value.keys() - {"state"} == {"param_groups"}
        and isinstance(value.get("state", {}), dict)
        and bool(groups)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        and all(type(p) in (int, str) for g in groups for p in g["params"])
        and all(isinstance(g.get("param_names", []), list) for g in groups)
    )
