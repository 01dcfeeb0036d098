"""The device of each tensor that a load allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from limpet.errors import LimpetError
from limpet.layout.devices import find_device
from limpet.snapshot.reader import SnapshotReader

SAVED = "saved"
"""The value of ``device=`` for the devices from which the tensors were saved."""


def device_chooser(snapshot: SnapshotReader, device: Any) -> Callable[[str], Any]:
    """Return a function that returns the device for a leaf's key.

    ``device`` is one device for all, None for the CPU, ``"saved"``, or a mapping from saved devices
    to devices, as ``map_location`` of ``torch.load``: a device that is not in it stays. A name
    without an index stands for all devices of that type that are not in the mapping. Raises
    ``LimpetError`` for an invalid mapping; the function, if a device is not known or not here.
    """
    is_mapping = isinstance(device, Mapping)
    if device != SAVED and not is_mapping:
        return lambda key: device
    mapping = {str(_parse(k)): _parse(v) for k, v in device.items()} if is_mapping else {}
    records: list[Any] = []
    checked: dict[str, Any] = {}

    def choose(key: str) -> Any:
        if not records:  # read now, because the ranks of a load raise together
            records.append(snapshot.metadata.get("devices"))
        saved = find_device(records[0], key)
        if saved is None:
            raise LimpetError(
                f"It is not known from which device {key!r} in {snapshot.url} was saved",
                expected="a version in which all ranks that have the tensor recorded one kind of"
                " device",
                found="no record" if records[0] is None else "a record without this tensor",
                todo="Versions of earlier releases of Limpet have no record. Pass one device,"
                ' such as device="cpu"',
                leaf=key,
            )
        if saved not in checked:
            chosen = mapping.get(saved, mapping.get(saved.partition(":")[0], saved))
            checked[saved] = _require_device(chosen, saved, key, snapshot.url)
        return checked[saved]

    return choose


def _parse(device: Any) -> Any:
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise LimpetError(
            "Invalid mapping in device=",
            expected='devices, such as {"cuda:0": "cpu"}',
            found=repr(device)[:80],
        ) from e


def _require_device(device: Any, saved: str, key: str, url: str) -> Any:
    """Return the device. Raises ``LimpetError`` if this process has no such device."""
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as e:
        is_mapped = str(device) != saved
        raise LimpetError(
            f"{key!r} in {url} was saved from {saved}"
            + (f", which device= maps to {device}" if is_mapped else ""),
            expected=f"the device {device} in this process",
            found=str(e).partition("\n")[0][:200] or type(e).__name__,
            todo=f'Map it to a device that exists: device={{"{saved}": "cpu"}}, or pass one device'
            ' for all tensors: device="cpu"',
            leaf=key,
        ) from e
    return device
