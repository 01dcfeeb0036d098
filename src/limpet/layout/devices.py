"""The devices of a state's tensors, as a manifest records them: a short map from keys to devices.

A *device map* is the device of all tensors, such as ``cuda:0``, None if unknown, or a dict with a
map for each next part of the keys (``/model``, ``.fc``), for ``*``, all other parts, and for the
empty name, the tensor whose key ends here. So a pattern in the devices gives a small map.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

DeviceMap = str | None | dict[str, Any]

_OTHERS = "*"
_MAX_PARTS = 24
_NEXT_PART = re.compile(r"(?=[/.])")


def make_device_map(devices: Mapping[str, object]) -> DeviceMap:
    """Return the map of tensors by key. None: there is no tensor. ``devices``: by key, as text or
    as an object of PyTorch, whose text it is."""
    if len(found := {*devices.values()}) < 2:
        return str(found.pop()) if found else None
    root: dict[str, Any] = {}
    for key, device in devices.items():
        node = root
        for part in _split(key):
            node = node.setdefault(part, {})
        node[""] = str(device)
    return _fold(root, {})


def merge_device_maps(maps: Iterable[DeviceMap]) -> DeviceMap:
    """Return one map for the tensors of all ranks: where the devices differ, their type (``cuda``),
    because which of them is used belongs to the rank; None where the types differ, too."""
    merged: DeviceMap = None
    seen: set[bytes] = set()
    for one in maps:
        if one is not None and (encoded := msgspec.json.encode(one)) not in seen:
            merged = _merge(merged, one) if seen else one
            seen.add(encoded)
    return merged


def find_device(devices: object, key: str) -> str | None:
    """Return the device of a tensor, or None if the map, which may be invalid, does not tell."""
    for part in (*_split(key), ""):
        if not isinstance(devices, dict):
            break
        devices = devices.get(part, devices.get(_OTHERS))
    return devices if isinstance(devices, str) else None


def _split(key: str) -> list[str]:
    return _NEXT_PART.split(f"/{key}", _MAX_PARTS)[1:]


def _fold(node: dict[str, Any], interned: dict[Any, DeviceMap]) -> DeviceMap:
    """Return the map of a node. ``interned`` has one object for all equal maps, so that they can
    be compared by their ids."""
    maps = {
        part: _fold(child, interned) if type(child) is dict else interned.setdefault(child, child)
        for part, child in node.items()
    }
    ids = [id(m) for m in maps.values()]
    usual, count = (ids[0], len(ids)) if len(set(ids)) == 1 else Counter(ids).most_common(1)[0]
    if count == len(ids) and isinstance(first := next(iter(maps.values())), str):
        return first
    if count > 1:
        first = next(m for m in maps.values() if id(m) == usual)
        maps = {_OTHERS: first} | {part: m for part, m in maps.items() if id(m) != usual}
    return interned.setdefault(tuple((part, id(m)) for part, m in maps.items()), maps)


def _merge(a: DeviceMap, b: DeviceMap) -> DeviceMap:
    if a == b:
        return a
    if isinstance(a, dict) or isinstance(b, dict):
        a, b = (m if isinstance(m, dict) else {_OTHERS: m} for m in (a, b))
        return {part: _merge_member(a, b, part) for part in dict.fromkeys([*a, *b])}
    types = {str(device).partition(":")[0] for device in (a, b) if device is not None}
    return types.pop() if len(types) == 1 and None not in (a, b) else None


def _merge_member(a: dict[str, Any], b: dict[str, Any], part: str) -> DeviceMap:
    sides = [m.get(part, m.get(_OTHERS, m)) for m in (a, b)]
    known = [m for m, side in zip(sides, (a, b), strict=True) if m is not side]
    return _merge(*known) if len(known) == 2 else known[0]
