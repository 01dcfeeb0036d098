"""The members of a foreign checkpoint: its models, optimizers, schedulers, scalers, and the rest.

Each library names or numbers them in its own way. ``read_members`` finds them, and
``match_members`` assigns them to those of a live state: by name, else by kind, the n-th model to
the n-th module if the library numbers them. What cannot be known is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Literal

from limpet import lazy_torch
from limpet.errors import NotFound, PlanError
from limpet.interop.arrange import MODEL_KEY, is_module_state_dict, unwrap_state
from limpet.interop.import_ import (
    TRAINER_STATE_FILE,
    ForeignCheckpoint,
    read_foreign_checkpoint,
    read_member_file,
)
from limpet.interop.key_optimizer import LiveParameters, key_optimizer_state
from limpet.interop.mmap_files import Advance
from limpet.interop.read_dcp import METADATA_FILE, TensorBoxes
from limpet.interop.read_safetensors import find_model_file
from limpet.interop.stored_files import ForeignFolder, StoredTensor, locate_foreign
from limpet.snapshot.location import Location
from limpet.state import modules
from limpet.text import format_list
from limpet.threads import no_op

Role = Literal["model", "optimizer", "scheduler", "scaler"]

_MAX_LISTED = 20
_STATE_SUFFIXES = ("", "_state_dict", "_state")
"""What names in a checkpoint have behind the name of the live member."""

_MEMBER_FILE = re.compile(
    r"(?:pytorch_)?(?P<role>model|optimizer|scheduler|scaler)(?:_(?P<number>[0-9]{1,6}))?"
    r"\.(?:safetensors|bin|pt)"
)
"""The files of Accelerate (``optimizer.bin``, ``model_1.safetensors``) and of the Trainer of
Transformers (``optimizer.pt``)."""

_LIGHTNING_LISTS: tuple[tuple[str, Role], ...] = (
    ("optimizer_states", "optimizer"),
    ("lr_schedulers", "scheduler"),
)
_LIGHTNING_MODEL = "state_dict"
_LIGHTNING_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
_LIGHTNING_VERSION = "pytorch-lightning_version"


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a foreign checkpoint.

    ``role``: None if it is not known. ``number``: its position among the members of its role, if
    the library saves them in the order in which the user created them. ``read`` returns its value.
    """

    name: str
    role: Role | None
    read: Callable[[], Any]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class ForeignMembers:
    """The members of the checkpoint ``checkpoint``. ``kind``: as there, or ``transformers`` or
    ``accelerate``."""

    checkpoint: ForeignCheckpoint
    kind: str
    members: tuple[Member, ...]


def read_members(path: str | Location, advance: Advance = no_op) -> ForeignMembers:
    """Find the members of the checkpoint in the file or folder at a path, a URL, or a location.

    The other files of a folder of Transformers or Accelerate are read only if they are needed.
    Raises as ``read_foreign_checkpoint`` does; so does ``Member.read``.
    """
    checkpoint = read_foreign_checkpoint(path, advance)
    if checkpoint.kind == "huggingface":
        folder = ForeignFolder(*locate_foreign(path))
        return ForeignMembers(checkpoint, *_folder_members(folder, checkpoint, advance))
    value = checkpoint.value
    if checkpoint.kind == "lightning":
        return ForeignMembers(checkpoint, checkpoint.kind, tuple(_lightning_members(value)))
    if not isinstance(value, dict) or is_module_state_dict(value) or _is_optimizer_state(value):
        role = _role_of(value)
        value = {role or MODEL_KEY: value}
    members = tuple(_member(str(name), _role_of(v), v) for name, v in value.items())
    return ForeignMembers(checkpoint, checkpoint.kind, members)


def is_foreign(location: Location) -> bool:
    """Return True if a location has a file, or a folder with the files of a checkpoint of another
    library. They are not read. Raises ``StoreError``."""
    path, stored = locate_foreign(location)
    if stored is None:
        if not os.path.isdir(path):
            return os.path.isfile(path)
    elif stored.folder:
        with suppress(NotFound):
            stored.store.stat(stored.folder)
            return True
    names = ForeignFolder(path, stored).names()
    has_model = find_model_file(set(names)) is not None or METADATA_FILE in names
    return has_model or any(map(_MEMBER_FILE.fullmatch, names))


def role_of_fields(names: Collection[Any]) -> Role | None:
    """Return what the ``state_dict()`` with these names belongs to, if it is not a model."""
    if "state" in names and "param_groups" in names:
        return "optimizer"
    if "last_epoch" in names or "_last_lr" in names:  # ChainedScheduler has only the second
        return "scheduler"
    if "scale" in names and "growth_factor" in names:
        return "scaler"
    return None


def _is_optimizer_state(value: Any) -> bool:
    return isinstance(value, dict) and role_of_fields(value) == "optimizer"


def _role_of(value: Any) -> Role | None:
    if not isinstance(value, dict):
        return None
    return "model" if value and is_module_state_dict(value) else role_of_fields(value)


def _member(name: str, role: Role | None, value: Any, number: int | None = None) -> Member:
    return Member(name, role, lambda: value, number)


def _lightning_members(value: dict[Any, Any]) -> Iterator[Member]:
    lists = dict(_LIGHTNING_LISTS)
    for name, member in value.items():
        if name == _LIGHTNING_MODEL:
            yield _member(name, "model", member, 0)
        elif name in lists and isinstance(member, list):
            for i, state in enumerate(member):
                yield _member(f"{name}[{i}]", lists[name], state, i)
        elif name in _LIGHTNING_SCALERS:
            yield _member(name, "scaler", member, 0)
        elif name != _LIGHTNING_VERSION:
            yield _member(str(name), None, member)


def _folder_members(
    folder: ForeignFolder, checkpoint: ForeignCheckpoint, advance: Advance
) -> tuple[str, tuple[Member, ...]]:
    """Return the kind of a folder, and its members: the model, and all other files with state."""
    names = folder.names()
    is_trainer = TRAINER_STATE_FILE in names
    matches = {name: _MEMBER_FILE.fullmatch(name) for name in checkpoint.left_out}
    is_training = any(match and match["role"] == "optimizer" for match in matches.values())
    is_numbered = is_training and not is_trainer
    number = 0 if is_numbered else None
    members = [_member(MODEL_KEY, "model", checkpoint.value, number)]
    for name, match in matches.items():
        members.append(_file_member(folder, name, match, is_numbered, advance))
    if is_trainer:
        members.append(Member(TRAINER_STATE_FILE, None, lambda: None))
    kind = "transformers" if is_trainer else "accelerate" if is_training else checkpoint.kind
    return kind, tuple(members)


def _file_member(
    folder: ForeignFolder,
    name: str,
    match: re.Match[str] | None,
    is_numbered: bool,
    advance: Advance,
) -> Member:
    def read() -> Any:
        return read_member_file(folder, name, advance)

    if match is None:
        return Member(name, None, read)
    role: Any = match["role"]
    return Member(name, role, read, int(match["number"] or 0) if is_numbered else None)


# -- matching ----------------------------------------------------------------------------------


@dataclass(slots=True)
class MatchedState:
    """The part of a checkpoint that the live state has, under the live names.

    ``left_out``: what the live state has no place for.
    """

    state: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def match_members(
    members: Sequence[Member],
    into: Mapping[str, Any],
    keys: str | Sequence[str] | None,
    renames: Mapping[str, str],
    path: str,
) -> MatchedState:
    """Return the members that the live state ``into`` has, in the form in which Limpet saves.

    ``renames``: live names by the names of members. ``keys``: patterns; live members of which none
    selects a part are not read. Optimizer state that numbers its parameters is keyed by the names
    of the live parameters: see ``key_optimizer_state``.

    Raises ``PlanError`` if a member fits several live members, or the reverse, and the errors of
    ``Member.read`` and ``key_optimizer_state``.
    """
    chosen = _choose(members, into, renames, path)
    matched = MatchedState()
    used = {member.name for member in chosen.values()}
    matched.left_out += [m.name for m in members if m.name not in used]
    parameters: LiveParameters | None = None
    for name, live in into.items():
        member = chosen.get(name)
        if member is None or not _selects_part(keys, name):
            continue
        value = member.read()
        if modules.is_module(live) and is_module_state_dict(value):
            value, outside = _fit_names(unwrap_state(value), live, name, member.name)
            value = _tie(value, live, name)
            matched.left_out += outside
        elif _is_optimizer(live) and _is_optimizer_state(value):
            parameters = parameters or LiveParameters.of(into)
            value = key_optimizer_state(live, value, parameters, name, path)
        matched.state[name] = value
    return matched


def _selects_part(keys: str | Sequence[str] | None, name: str) -> bool:
    if keys is None:
        return True
    first_levels = [p.split("/")[0] for p in ([keys] if isinstance(keys, str) else keys)]
    names = accumulate(str(name).split("."), "{}.{}".format)
    return any(fnmatchcase(n, level) for n in names for level in first_levels)


def _is_optimizer(live: Any) -> bool:
    torch = lazy_torch.torch_or_none()
    return torch is not None and isinstance(live, torch.optim.Optimizer)


def _live_role(live: Any) -> Role | None:
    if modules.is_module(live):
        return "model"
    if _is_optimizer(live):
        return "optimizer"
    if callable(getattr(live, "get_last_lr", None)) and modules.is_stateful(live):
        return "scheduler"
    if callable(getattr(live, "get_scale", None)) and modules.is_stateful(live):
        return "scaler"
    return None


# -- choosing ------------------------------------------------------------------------------------


def _choose(
    members: Sequence[Member], into: Mapping[str, Any], renames: Mapping[str, str], path: str
) -> dict[str, Member]:
    """Return the member for each live name, as far as there is one."""
    by_name = {m.name: m for m in members}
    unknown = [name for name in renames if name not in by_name]
    if unknown:
        raise PlanError(
            f"Members to rename are not in {path}: {', '.join(unknown)}",
            found=format_list(list(by_name), _MAX_LISTED),
        )
    chosen = {renames[m.name]: m for m in members if m.name in renames and renames[m.name] in into}
    unnumbered = {m.name: m for m in members if m.name not in renames and m.number is None}
    for name in into:
        found = [unnumbered[n] for n in _saved_names(name) if n in unnumbered]
        if name not in chosen and found:
            chosen[name] = _only(found, [name], path)
    used = {m.name for m in chosen.values()}
    free = [m for m in members if m.name not in used and m.role is not None]
    roles = {name: _live_role(live) for name, live in into.items()}
    for role in dict.fromkeys(m.role for m in free):
        same = [m for m in free if m.role == role]
        live = [name for name in into if roles[name] == role]
        names = [name for name in live if name not in chosen]
        if all(m.number is not None for m in same):
            chosen.update(zip(names, sorted(same, key=lambda m: m.number or 0), strict=False))
        elif names == live and names:  # otherwise, the other names are those of other members
            chosen[names[0]] = _only(same, names, path)
    return chosen


def _saved_names(name: str) -> list[str]:
    """Return the names of members that go to a live member by its name."""
    endings = (*_STATE_SUFFIXES, ".pkl", ".pt", ".pth", ".bin")
    return [f"{name}{ending}" for ending in endings]


def _only(members: Sequence[Member], names: Sequence[str], path: str) -> Member:
    """Return the only member. Raise ``PlanError`` if several members or live names are possible."""
    if len(members) == len(names) == 1:
        return members[0]
    example = f'rename={{"{members[0].name}": "{names[0]}"}}'
    raise PlanError(
        f"{path} does not say which of its members belong to {format_list(names, _MAX_LISTED)} of"
        " the live state; nothing was changed",
        expected="members with the names of the live state, or one of each kind",
        found=format_list([m.name for m in members], _MAX_LISTED),
        todo=f"Give the live state these names, or pass a rename for each, such as {example}",
    )


# -- modules -------------------------------------------------------------------------------------


def _fit_names(
    state: dict[str, Any], module: Any, name: str, member: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the state dict for a module that may be a part of the saved one, and what lies outside
    of that part.

    A LightningModule, for example, saves the names of its submodule ``net`` with the prefix
    ``net.``. If no name fits the live module, and exactly one prefix makes all of them fit, the
    names below it are returned without it.
    """
    live = modules.strip_wrapper_names(module, list(module.state_dict()), name)
    if not live or not state or any(n in state for n in live):
        return state, []
    prefixes = {n[: -len(live[0])] for n in state if n.endswith(f".{live[0]}")}
    prefixes = {p for p in prefixes if all(p + n in state for n in live)}
    if not prefixes:
        return state, []
    if len(prefixes) > 1:
        raise PlanError(
            f"Several parts of {member} fit the live module {name}; nothing was changed",
            found=format_list(sorted(prefixes), _MAX_LISTED),
            todo="Put the module that contains it into the live state",
        )
    prefix = prefixes.pop()
    inside = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
    return inside, [f"{member}: {n}" for n in state if not n.startswith(prefix)]


def _tie(state: dict[str, Any], module: Any, name: str) -> dict[str, Any]:
    """Return the state dict with the tensors tied that are one parameter of the live module.

    DCP saves a copy under each name of a tied parameter, and Transformers saves only one of the
    names. Copies that differ stay as they are, and the load refuses them.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    plain = modules.strip_wrapper_names(module, list(named), name)
    names_by_id: dict[int, list[str]] = {}
    for live_name, parameter in zip(plain, named.values(), strict=True):
        names_by_id.setdefault(id(parameter), []).append(live_name)
    tied = dict(state)
    for names in names_by_id.values():
        values = [state[n] for n in names if n in state]
        if len(names) > 1 and values and all(_is_same(values[0], v) for v in values[1:]):
            tied.update(dict.fromkeys(names, values[0]))
    return tied


def _is_same(a: Any, b: Any) -> bool:
    """Return True if two tensors have the same dtype, shape, and bytes."""
    if isinstance(a, TensorBoxes) and isinstance(b, TensorBoxes):
        return (a.dtype, a.shape, len(a.boxes)) == (b.dtype, b.shape, len(b.boxes)) and all(
            x.box == y.box and _is_same(x.tensor, y.tensor)
            for x, y in zip(a.boxes, b.boxes, strict=True)
        )
    torch: Any = lazy_torch.torch_or_none()
    a, b = (t.fetch() if isinstance(t, StoredTensor) else t for t in (a, b))
    if not (type(a) is type(b) is torch.Tensor and (a.dtype, a.shape) == (b.dtype, b.shape)):
        return False
    raw, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(raw, other))
