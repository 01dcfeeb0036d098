"""Key the state of an optimizer that another library saved by the names of the live parameters.

PyTorch numbers the parameters of an optimizer in the order of its groups, and does not record their
names. So the numbers have a meaning only next to a live optimizer with the same groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from limpet import lazy_torch
from limpet.errors import FormatError, PlanError, ShapeMismatch, UnexpectedLeaf, Unsupported
from limpet.format.names import join_key
from limpet.interop.arrange import unwrap_names
from limpet.state import modules, optimizers
from limpet.state.walk import find_named_instances
from limpet.text import format_list

_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class LiveParameters:
    """The parameters of the modules in a live state.

    ``names``: their qualified names, by ``id``. ``ids``: by the path of each module, their ids by
    the name in the module, with every name of a tied parameter.
    """

    names: dict[int, str]
    ids: dict[str, dict[str, int]]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> LiveParameters:
        torch = lazy_torch.torch_or_none()
        ids = {}
        for path, module in find_named_instances(state, torch.nn.Module):
            named = dict(module.named_parameters(remove_duplicate=False))
            plain = modules.strip_wrapper_names(module, list(named), path)
            ids[path] = dict(zip(plain, map(id, named.values()), strict=True))
        return cls(modules.parameter_names(state), ids)


def key_optimizer_state(
    optimizer: Any, saved: Mapping[str, Any], parameters: LiveParameters, key: str, path: str
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` in the form in which Limpet saves ``optimizer``.

    Numbered parameters are those of the live groups, in order. If the state names its parameters,
    as PyTorch does since 2.6 for ``named_parameters()`` and in ``get_optimizer_state_dict``, the
    names count. The shape of every slot is compared with that of its live slot, or of its
    parameter. An optimizer with a ``state_dict`` of its own gets the state as it is.

    Raises ``PlanError``, ``UnexpectedLeaf`` for names without a live parameter, ``ShapeMismatch``
    that lists all slots, ``Unsupported``, and ``FormatError`` for a state of no optimizer.
    """
    groups, slots = _check_saved(saved, key, path)
    grouped = optimizers.group_parameter_names(optimizer, parameters.names)
    live = {
        name: parameter
        for group, names in zip(optimizer.param_groups, grouped, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    }
    named = [_recorded_names(group) for group in groups]
    if None in named:
        names = _by_position(groups, grouped, key, path)
    else:
        names = _by_name([n or [] for n in named], groups, live, parameters, key, path)
    by_saved = {
        str(saved_id): name
        for group, live_names in zip(groups, names, strict=True)
        for saved_id, name in zip(group["params"], live_names, strict=True)
    }
    _check_shapes(optimizer, slots, by_saved, live, key, path)
    if not optimizers.is_standard_optimizer(optimizer):
        if None not in named:
            raise Unsupported(
                f"The state of {key} in {path} names its parameters, but the live"
                f" {type(optimizer).__name__} has a state_dict() of its own, which numbers them",
                todo="Load into the optimizer that it wraps",
                leaf=key,
            )
        return dict(saved)
    return {
        "state": {by_saved[str(n)]: dict(values) for n, values in slots.items()},
        "groups": [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            | {"params": live_names}
            for group, live_names in zip(groups, names, strict=True)
        ],
    }


def _check_saved(
    saved: Mapping[str, Any], key: str, path: str
) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return the groups and the slots by parameter. Raise ``FormatError`` if they are invalid."""
    groups, slots = saved["param_groups"], saved["state"]
    slots = {} if slots is None else slots  # DCP saves no empty dict
    valid = isinstance(groups, list) and isinstance(slots, dict)
    valid = valid and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    numbers = [str(n) for g in groups for n in g["params"]] if valid else []
    known = set(numbers)
    unknown = [n for n in slots if str(n) not in known] if valid else []
    no_slots = [n for n, s in slots.items() if not isinstance(s, dict)] if valid else []
    if not valid or unknown or no_slots or len(known) < len(numbers):
        raise FormatError(
            f"The state of {key} in {path} is not that of an optimizer of PyTorch",
            expected="groups with parameters, and a dict of slots for each of these parameters",
            found=f"slots of parameter {(unknown or no_slots)[0]!r}"
            if unknown or no_slots
            else "other groups or a parameter in two groups",
            todo="Load the other members, without the optimizer",
            leaf=key,
        )
    return groups, slots


def _recorded_names(group: Mapping[str, Any]) -> list[str] | None:
    """Return the names that a group records for its parameters, if any."""
    names = group.get("param_names", group["params"])
    is_named = isinstance(names, list) and len(names) == len(group["params"])
    return names if is_named and all(type(n) is str for n in names) else None


def _by_position(
    groups: Sequence[Mapping[str, Any]], grouped: list[list[str]], key: str, path: str
) -> list[list[str]]:
    """Return the live names of each group, whose parameters have the same positions."""
    saved_sizes = [len(group["params"]) for group in groups]
    live_sizes = [len(names) for names in grouped]
    if saved_sizes != live_sizes:
        raise PlanError(
            f"The optimizer at {key} has other groups of parameters than in {path}; nothing was"
            " changed",
            expected=_describe_groups(saved_sizes),
            found=f"{_describe_groups(live_sizes)} in the live optimizer",
            todo="The checkpoint numbers parameters by their order. Create the optimizer as in the"
            " training that wrote it, with the same groups and the same frozen parameters",
            leaf=key,
        )
    return grouped


def _describe_groups(sizes: Sequence[int]) -> str:
    return f"groups of {', '.join(map(str, sizes))} parameters"


def _by_name(
    named: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    live: Mapping[str, Any],
    parameters: LiveParameters,
    key: str,
    path: str,
) -> list[list[str]]:
    """Return the live names of the parameters of each group, which the state names."""
    flat = [name for names in named for name in names]
    plain = unwrap_names(flat)
    owned = set(live)
    for ids in parameters.ids.values():
        if not flat or not all(parameters.names.get(ids.get(n, 0)) in owned for n in plain):
            continue
        resolved = [parameters.names[ids[n]] for n in plain]
        if len({*resolved}) == len(flat):
            names = iter(resolved)
            return [[next(names) for _ in group["params"]] for group in groups]
    modules_named = format_list(list(parameters.ids), _MAX_LISTED) or "no module"
    everywhere = {n for ids in parameters.ids.values() for n in ids}
    surplus = [n for n in plain if n not in everywhere]
    raise UnexpectedLeaf(
        f"No module of the live state has all parameters that the state of {key} in {path} names;"
        " nothing was changed",
        expected=f"the parameters of one module of the live state ({modules_named}), all of which"
        " the live optimizer trains",
        found=format_list(surplus or plain, _MAX_LISTED) or "no parameters",
        todo="Put the same model into the live state, and give the optimizer its parameters",
        leaf=key,
    )


# -- shapes --------------------------------------------------------------------------------------


def _check_shapes(
    optimizer: Any,
    slots: Mapping[Any, Mapping[str, Any]],
    names: Mapping[str, str],
    live: Mapping[str, Any],
    key: str,
    path: str,
) -> None:
    """Raise ``ShapeMismatch``, which lists all slots whose shape does not fit their parameter."""
    misfits = {}
    for number, values in slots.items():
        parameter = live[names[str(number)]]
        live_slots = optimizer.state.get(parameter, {})
        for slot, value in values.items():
            if not hasattr(value, "shape"):
                continue
            shape = tuple(value.shape)
            expected = _shape_of(live_slots.get(slot))
            if expected is None:
                # a step counter, or state of any other kind that belongs to no element
                fits = shape in (tuple(parameter.shape), ()) or (
                    slot == "step" and prod(shape) == 1
                )
            else:
                fits = shape == expected
            if not fits:
                leaf = join_key(join_key(f"{key}/state", names[str(number)]), str(slot))
                misfits[leaf] = f"{leaf} {list(shape)}, live {list(expected or parameter.shape)}"
    if misfits:
        raise ShapeMismatch(
            f"{len(misfits)} slots of {key} in {path} do not fit the live parameters at their"
            f" positions; nothing was changed: {format_list(list(misfits.values()), _MAX_LISTED)}",
            todo="Create the optimizer as in the training that wrote the checkpoint, with the same"
            " order of parameters. If its slots have other shapes than its parameters, let it step"
            " once before the load, so that they are compared with its own",
            misfits=tuple(misfits),
        )


def _shape_of(slot: Any) -> tuple[int, ...] | None:
    return tuple(slot.shape) if hasattr(slot, "shape") else None
