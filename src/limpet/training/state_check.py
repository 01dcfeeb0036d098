"""What the state says about the script: what it lacks so that a resume is exact, and the options of
its optimizers. This reads only the state."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from inspect import signature
from itertools import islice
from math import isfinite
from typing import Any, Protocol, runtime_checkable
from weakref import ref

from limpet.data.progress import Progress
from limpet.data.rng import RNG
from limpet.errors import InexactResume, LimpetError
from limpet.format.digest import digest
from limpet.lazy_torch import torch_or_none
from limpet.loading.bind_stateful import is_from_torchdata
from limpet.state.flatten import flatten
from limpet.state.modules import submodules_of
from limpet.state.optimizers import is_standard_optimizer
from limpet.state.replication import PerRank, Replicated
from limpet.state.sharding import is_distributed_tensor
from limpet.state.walk import find_named_instances, parameters_of, storage_address
from limpet.text import format_count, format_list, to_repr, warn_user

_MAX_NAMES = 3


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...


def loader_kinds() -> tuple[type, ...]:
    """Return the class ``limpet.DataLoader`` if the program uses it, without an import of it."""
    module = sys.modules.get("limpet.data.loader")
    return () if module is None else (module.DataLoader,)


def find_members(value: Any, kind: Any) -> dict[str, Any]:
    """Return the instances of ``kind`` by their keys, also those in ``PerRank``, ``Replicated``."""
    found: dict[int, tuple[str, Any]] = {}
    kinds: Any = (kind, PerRank, Replicated)
    for key, member in find_named_instances(value, kinds, separator="/"):
        is_wrapped = isinstance(member, PerRank | Replicated)
        for name, inner in (
            find_members(member.value, kind) if is_wrapped else {"": member}
        ).items():
            found.setdefault(id(inner), ("/".join(filter(None, (key, name))), inner))
    return dict(found.values())


def find_iterators(state: dict[str, Any]) -> list[tuple[str, ref[Any]]]:
    """Return the iterators of torchdata's loaders in a state. A loader applies a loaded position
    only at the next ``iter()``, so an earlier iterator ignores it."""
    return [
        (key, ref(iterator))
        for key, loader in find_members(state, _Stateful).items()
        if is_from_torchdata(loader)
        for name in ("_iterator", "_it")
        if (iterator := vars(loader).get(name)) is not None
    ]


def check_ended(iterators: list[tuple[str, ref[Any]]]) -> None:
    """Raise ``LimpetError``, after a load, if one of these iterators may still be used."""
    if any(iterator() is not None for _, iterator in iterators):
        gc.collect()
    for key, iterator in iterators:
        if iterator() is not None:
            raise LimpetError(
                f"An iterator of {key} is older than the position that resume() has loaded, and"
                " ignores it: call iter() after resume(), and resume() outside of the loop"
            )


def report_lacking(run_url: str, state: dict[str, Any]) -> None:
    """Warn, after the second step, of trained parameters that the state surely lacks."""
    torch: Any = torch_or_none()
    if torch is None:
        return
    scheduler, scaler = torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
    module, optimizer, loaders = torch.nn.Module, torch.optim.Optimizer, loader_kinds()
    known: Any = module, optimizer, scheduler, scaler, Progress, RNG, *loaders
    members = find_members(state, _Stateful).values()
    if not all(isinstance(member, known) for member in members):
        return
    modules = [member for member in members if isinstance(member, module)]
    if modules and (gaps := _find_untrained(state, modules, torch)):
        warn_user(
            f"A resume of {run_url} would not be exact, because the state lacks something:"
            + "".join(f"\n- {gap}." for gap in gaps)
            + '\nTo add a member to an existing run, call resume(missing="keep") once.',
            InexactResume,
        )


def _find_untrained(state: dict[str, Any], modules: list[Any], torch: Any) -> list[str]:
    """Describe the parameters that an optimizer has changed, and that the state lacks."""
    lacking: dict[str, list[Any]] = {}
    saved = {id(p) for module in modules for p in module.parameters()}
    for key, optimizer in find_members(state, torch.optim.Optimizer).items():
        for p in parameters_of(optimizer) if is_standard_optimizer(optimizer) else ():
            # fully_shard replaces the sharded parameters of a module during a forward pass
            is_known = id(p) in saved or is_distributed_tensor(p)
            if not is_known and p.requires_grad and (p.grad is not None or p in optimizer.state):
                lacking.setdefault(key, []).append(p)
    # a tensor or an array of the state, or what a module adds to its state, may share the memory
    gaps, addresses = [], {0}
    for leaf in flatten(state).leaves if lacking else ():
        source: Any = leaf.source
        if isinstance(source, torch.Tensor):
            addresses.add(storage_address(source))
        elif hasattr(source, "__array_interface__"):  # not a Source
            addresses.add(source.__array_interface__["data"][0])
    for key, parameters in lacking.items():
        shapes = [str([*p.shape]) for p in parameters if storage_address(p) not in addresses]
        if shapes:
            gaps.append(
                f"It lacks {format_count(len(shapes), 'parameter')} of {key}"
                f" ({format_list(shapes, _MAX_NAMES)}): no module in the state has them. Add their"
                " module, not a copy of it. If parameters of a module were replaced after the"
                " optimizer was created (a new layer, fully_shard), create it afterwards"
            )
    return gaps


# -- the options that the script has passed to its optimizers and schedulers ---------------------
#
# A training changes its learning rate, so the live options of a version say nothing about the
# script. Versions therefore record the options at the start of the process.

OPTIONS = "options"
"""The field of the training metadata of a version."""

_MAX_OPTIONS = 64
"""The optimizers and schedulers whose options are recorded, their groups, and their options."""

Options = dict[str, list[Any]]
"""The plain options of optimizers, and arguments of schedulers, by key and name: the values of all
groups, or one if they are equal."""


def read_options(state: dict[str, Any]) -> Options:
    """Return the options of the optimizers in a state, and the arguments of its schedulers."""
    torch: Any = torch_or_none()
    if torch is None:
        return {}
    optimizers = find_members(state, torch.optim.Optimizer)
    members = {key: getattr(o, "param_groups", ()) for key, o in optimizers.items()}
    schedulers = find_members(state, torch.optim.lr_scheduler.LRScheduler)
    while schedulers:
        key, scheduler = schedulers.popitem()
        members[key] = [_arguments_of(scheduler)]
        nested = getattr(scheduler, "_schedulers", ())
        schedulers |= {f"{key}/{number}": inner for number, inner in enumerate(nested)}
    found: Options = {}
    for key, param_groups in islice(members.items(), _MAX_OPTIONS):
        first = islice(param_groups, _MAX_OPTIONS)
        groups = [_plain_options(group) for group in first if isinstance(group, dict)]
        for name in groups[0] if groups else ():
            values = [group.get(name) for group in groups]
            found[f"{key}/{name}"] = values if values != values[:1] * len(values) else values[:1]
    return found


def _arguments_of(scheduler: Any) -> dict[str, Any]:
    """Return the arguments with which a scheduler was created, if it has them as attributes."""
    found = {}
    for name in signature(type(scheduler)).parameters:
        value = vars(scheduler).get(name, vars(scheduler).get(f"_{name}"))
        if name not in ("optimizer", "last_epoch"):  # which says where it is
            found[name] = sorted(value.elements()) if isinstance(value, Counter) else value
    return found


def describe_changes(script: Options, earlier: Any, used: Options) -> list[str]:
    """Describe the options that the script has changed since the version recorded ``earlier``, and
    that are nevertheless not ``used`` after the load."""
    before = earlier if isinstance(earlier, dict) else {}
    return [
        f"{name}: the script has {_show(values)}, had {_show(before[name])}; the version's"
        f" {_show(used[name])} is in use"
        for name, values in script.items()
        if name in before and name in used and values not in (before[name], used[name])
    ]


def _show(values: Any) -> str:
    return to_repr(values[0] if isinstance(values, list) and len(values) == 1 else values)


def _plain_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers, texts, and short tuples of numbers of a group, as JSON has them."""
    found: dict[str, Any] = {}
    for name, value in islice(group.items(), _MAX_OPTIONS):
        values = value if isinstance(value, list | tuple) else [value]
        plain = [_to_plain(v) for v in values[:8]]
        if name != "params" and len(values) <= 8 and ... not in plain:
            found[str(name)] = plain if values is value else plain[0]
    return found


def _to_plain(value: Any) -> Any:
    """Return a value, also of a subclass such as ``numpy.float64``, as in JSON, or else ``...``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and len(value) <= 80:
        return str(value)
    return float(value) if isinstance(value, float) and isfinite(value) else ...


# -- the modes of modules, which no state_dict() has ----------------------------------------------

MODES = "modes"
"""The field of the training metadata of a version."""


def read_modes(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a version records of the modes of each module, by its key."""
    torch: Any = torch_or_none()
    found = find_members(state, torch.nn.Module) if torch else {}
    return {MODES: {key: _modes_of(module)[0] for key, module in found.items()}} if found else {}


def _modes_of(module: Any) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Return as digits which parameters require gradients, and which parts of a training module are
    in training mode; and what has each mode. Containers of one module are left out."""
    torch: Any = torch_or_none()
    found = submodules_of(module)
    wrappers = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    while isinstance(module, wrappers):  # a validation with the module inside leaves their modes
        module = module.module
    parts = [m for m in found if m._parameters or m._buffers or len(m._modules) != 1]
    parameters = [p for m in parts for p in m._parameters.values() if p is not None]
    modes = {
        "names": digest(repr([[*m._parameters] for m in parts]).encode()),
        "requires_grad": "".join("01"[p.requires_grad] for p in parameters),
        "training": "".join("01"[m.training] for m in parts) if module.training else "",
    }
    return modes, {"requires_grad": parameters, "training": parts}


def restore_modes(state: dict[str, Any], saved: Any) -> list[str]:
    """Give the modules the modes of a version, and describe what that has changed. Gradients of a
    ``DistributedDataParallel``, which would not see the change, are left, with a warning."""
    torch: Any = torch_or_none()
    changes = []
    found = find_members(state, torch.nn.Module) if torch and isinstance(saved, dict) else {}
    for key, module in found.items():
        (live, owners), modes = _modes_of(module), saved.get(key)
        if not isinstance(modes, dict) or modes.get("names") != live["names"]:
            continue
        names = {id(o): n for n, o in (*module.named_parameters(), *module.named_modules())}
        ddp = torch.nn.parallel.DistributedDataParallel
        has_ddp = any(isinstance(m, ddp) for m in module.modules())
        for mode, parts in owners.items():
            digits = zip(parts, live[mode], str(modes.get(mode, "")))
            differing = [owner for owner, now, then in digits if now != then]
            found_names = sorted(names[id(o)] for o in differing)
            listing = f"{mode} of {format_list(found_names, _MAX_NAMES)} of {key}"
            if differing and has_ddp and mode == "requires_grad":
                warn_user(
                    f"{listing} is not that of the version: set it before"
                    " DistributedDataParallel(), which does not see later changes",
                    InexactResume,
                )
            elif differing:
                changes.append(f"{listing} is that of the version")
                for owner in differing:
                    setattr(owner, mode, not getattr(owner, mode))
    return changes
