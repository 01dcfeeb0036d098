"""A file for ``torch.load``: ``torch.save`` of the state in memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import IO, Any, cast

import numpy as np

from limpet.convert.export_record import ExportedFile
from limpet.format.digest import digest
from limpet.format.names import join_key
from limpet.format.tree import child_keys
from limpet.snapshot.location import Location
from limpet.state.optimizers import INNER
from limpet.storage.store import Upload
from limpet.text import with_article
from limpet.threads import no_op
from limpet.types import BLOCK_SIZE, Advance

_MAX_INT_BITS = 255 * 8 - 1
"""Bits of the longest integer that ``weights_only`` accepts."""

_MAX_SHORT = 64 << 10
"""The bytes up to which a write is collected with others."""

_PLAIN_TYPES = frozenset({type(None), str, bool, int, float, complex, bytes, bytearray})


@dataclass(slots=True)
class TorchState:
    """A state for ``torch.load(weights_only=True)``. ``refused``: what cannot be written, described
    by key; ``tensors``: the bytes of each tensor, by the address of its memory; ``names``: of the
    snapshot's parameters, by which Limpet saves an optimizer."""

    names: Collection[str]
    value: Any = None
    refused: dict[str, str] = field(default_factory=dict)
    tensors: dict[Any, int] = field(default_factory=dict)


def convert_state(value: Any, key: str, names: Collection[str], prefix: str = "") -> TorchState:
    """Convert a loaded state, or the part of it at ``key``: arrays to tensors, and optimizers to
    what ``load_state_dict`` accepts. ``prefix``: of an averaged model's names, which is removed."""
    state = TorchState(names)
    state.value = _convert(value, key, state)
    if prefix:
        state.value = _remove_prefix(state.value, prefix)
    return state


def _convert(value: Any, key: str, state: TorchState) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            state.refused[key] = f"of class {type(value).__name__}"
        address = value.data_ptr() if value.layout is torch.strided else id(value)
        state.tensors[address or id(value)] = value.numel() * value.element_size()
        return value
    if isinstance(value, np.ndarray):
        return _convert_array(value, key, state)
    if type(value) in (dict, OrderedDict, Counter):
        if type(value) is dict and (groups := _groups_of(value, state.names)) is not None:
            return _convert_optimizer(value, groups, key, state)
        members: Any = type(value)()
        for (name, inner), k in zip(value.items(), child_keys(list(value), key), strict=True):
            members[_convert_plain(name, k, state)] = _convert(inner, k, state)
        if hasattr(value, "_metadata"):
            members._metadata = value._metadata
        return members
    if type(value) in (list, tuple):
        return type(value)(
            [_convert(inner, join_key(key, str(i)), state) for i, inner in enumerate(value)]
        )
    if isinstance(value, torch.Size | torch.dtype | torch.device):
        return value
    return _convert_plain(value, key, state)


def _convert_array(value: Any, key: str, state: TorchState) -> Any:
    import torch

    try:
        tensor = torch.from_numpy(np.require(value, requirements="W"))
    except TypeError:
        state.refused[key] = f"an array of {value.dtype}"
        return None
    if not value.size:  # without the strides of an empty array
        tensor = torch.empty(value.shape, dtype=tensor.dtype, device="cpu")
    return _convert(tensor, key, state)


def _convert_plain(value: Any, key: str, state: TorchState) -> Any:
    """Return a plain value; record it in ``refused`` if it cannot be written."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        value = value.item()  # returns a long double unchanged, which is then refused
    refused = _unsupported_reason(value)
    if refused is not None:
        state.refused[key] = refused
    return value


def _unsupported_reason(value: Any) -> str | None:
    """Return what a plain value is if ``weights_only`` refuses it, else None."""
    if type(value) in (set, tuple):
        return next((r for r in map(_unsupported_reason, value) if r is not None), None)
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        return "an integer of more than 2,000 bits"
    if value == b"" and type(value) is bytes:
        return "empty bytes"
    return None if type(value) in _PLAIN_TYPES else with_article(type(value).__name__)


def _groups_of(value: dict[Any, Any], names: Collection[str]) -> list[Any] | None:
    """Return the groups of an optimizer whose parameters have names, as Limpet saves it; those of
    one with code of its own are beside what that saved. Return None for another value, also for a
    dict by other names, as ``get_optimizer_state_dict`` of torch.distributed returns it."""
    is_standard = {*value} - {INNER} == {"state", "groups"}
    groups = value.get("groups") if is_standard else value.get("param_groups")
    is_optimizer = (
        isinstance(value.get("state"), dict)
        and type(groups) is list
        and all(type(g) is dict and type(g.get("params")) is list for g in groups)
        and all(type(n) is str and (is_standard or n in names) for g in groups for n in g["params"])
    )
    return groups if is_optimizer else None


def _convert_optimizer(
    value: dict[Any, Any], groups: list[Any], key: str, state: TorchState
) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` accepts: parameters numbered by the groups."""
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    members = {k: v for k, v in value.items() if k not in ("state", "groups", "param_groups")}
    members["state"] = {numbers[k]: value["state"][k] for k in numbers if k in value["state"]} | {
        k: v for k, v in value["state"].items() if k not in numbers
    }
    members["param_groups"] = [
        {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
    ]
    if len(numbers) < len(names):
        state.refused[key] = "an optimizer with a parameter in two groups"
    return {name: _convert(member, join_key(key, name), state) for name, member in members.items()}


def _remove_prefix(members: Any, prefix: str) -> Any:
    """Remove a prefix of the names of a state dict, also from the module's metadata."""
    level = prefix.removesuffix(".")
    renamed = type(members)((n.removeprefix(prefix), v) for n, v in members.items())
    if hasattr(members, "_metadata"):
        renamed._metadata = type(members._metadata)(
            (name.removeprefix(level).removeprefix("."), value)
            for name, value in members._metadata.items()
            if name.startswith(level)
        )
    return renamed


class _Sink:
    """The file that ``torch.save`` writes to, several times for each tensor: short writes are
    collected. ``error``: what writing has raised, to be raised after ``torch.save``, whose writer
    would replace it by an error of its own."""

    def __init__(self, upload: Upload | None = None, advance: Advance = no_op) -> None:
        self._upload, self._advance = upload, advance
        self._short = bytearray()
        self._written = 0
        self.length = 0
        self.pieces: list[tuple[int, str]] = []
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.length += len(view)
        if self._upload is None:  # it only counts
            return len(view)
        for at in range(0, len(view), BLOCK_SIZE):
            piece = view[at : at + BLOCK_SIZE]
            is_short = len(piece) <= _MAX_SHORT
            if not is_short or len(self._short) + len(piece) > BLOCK_SIZE:
                self.write_short()
            if is_short:
                self._short += piece
            else:
                self._write_piece(piece)
        return len(view)

    def write_short(self) -> None:
        """Write what was collected."""
        short, self._short = self._short, bytearray()
        if short:
            self._write_piece(memoryview(short))

    def _write_piece(self, piece: memoryview) -> None:
        if self._upload is not None and self.error is None:
            try:
                self._upload.write_at(self._written, piece)
                self._advance(len(piece))
            except BaseException as e:  # noqa: BLE001  (raised later)
                self.error = e
        self.pieces.append((len(piece), digest(piece)))
        self._written += len(piece)

    def flush(self) -> None:
        """Do nothing; ``torch.save`` calls it."""


def write_torch_file(
    state: TorchState, location: Location, name: str, advance: Advance
) -> ExportedFile:
    """Write the file in two passes, because a store needs its length first. The first pass only
    counts. Raises ``AlreadyExists`` and ``StoreError``."""
    import torch

    counted = _Sink()
    torch.save(state.value, cast(IO[bytes], counted))
    with location.store.put(location.key(name), counted.length) as upload:
        sink = _Sink(upload, advance)
        torch.save(state.value, cast(IO[bytes], sink))
        sink.write_short()
        if sink.error is not None:
            raise sink.error
        upload.commit()
    return ExportedFile(sink.length, sink.pieces)
