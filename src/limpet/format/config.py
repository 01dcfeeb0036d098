"""The config of a training: plain values that its script passes, which every version stores."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import commonprefix
from types import FunctionType
from typing import Any

import msgspec
import numpy as np

from limpet.errors import LimpetError, Unsupported
from limpet.format import tree
from limpet.format.names import to_dotted
from limpet.format.rejected import NOT_PLAIN, Rejection, rejections_of, unsupported
from limpet.format.tree import Node
from limpet.text import format_list, format_size, hide_in_urls, to_repr, truncate, with_article
from limpet.types import MIB


def encode_config(config: object) -> Node:
    """Return a ``config=`` as a node, which is a copy for all saves; None: there is none. Raises
    ``LimpetError``, in one sentence, for anything but a dict of plain values."""
    try:
        if not isinstance(config, dict | None):
            _reject(config, "config", 0)
        node = tree.encode(config, "config", _reject)
    except Unsupported as e:
        found = format_list([*map(_describe, rejections_of(e))], 5)
        raise LimpetError(f"config= takes a dict of plain values, but {found}") from None
    if (nbytes := len(msgspec.json.encode(node))) > MIB:  # each version has it
        raise LimpetError(f"config= takes at most 1 MiB as JSON, not {format_size(nbytes)}")
    return node


def _reject(value: Any, key: str, depth: int) -> Node:
    is_named = isinstance(value, type | FunctionType)
    method = "__name__" if is_named else "tolist()" if hasattr(type(value), "tolist") else ""
    raise unsupported(value, key, NOT_PLAIN, method and f"Save value.{method}")


def _describe(rejection: Rejection) -> str:
    levels = map(to_dotted, rejection.key.split("/")[1:])
    where = "config" + "".join(f"[{n if n.isdecimal() else repr(n)}]" for n in levels)
    note, advice = rejection.why, rejection.advice
    if note == NOT_PLAIN:
        note = f"pass {advice[5:]}" if advice.startswith("Save ") else "leave it out"
    return f"{truncate(where, 200)} is {with_article(rejection.kind)} ({note})"


def config_entries(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the key and the node of each value of a config that is no dict, or an empty one."""
    members = tree.children(node, key) if tree.is_dict(node) else ()
    for _, member, member_key in members:
        yield from config_entries(member, member_key)
    if key and not members:
        yield key, node


def compare_configs(a: Node, b: Node) -> Iterator[dict[str, Any]]:
    """Yield each difference of two configs: its ``name``, such as ``optim.lr``, and the values
    ``a`` and ``b``, or only one of them. 1, 1.0, and True differ; NaN equals NaN, and tuples, and
    numbers of NumPy, equal what JSON has for them."""
    sides = {"a": dict(config_entries(a)), "b": dict(config_entries(b))}
    for key in sides["a"] | sides["b"]:
        nodes = {side: entries[key] for side, entries in sides.items() if key in entries}
        values = {s: tree.decode(n, key, tree.reject_leaf) for s, n in nodes.items()}
        plain = {repr(tree.encode(_to_json(v), key, lambda *v: v)) for v in values.values()}
        if len(nodes) == 1 or len(plain) == 2:
            yield {"name": to_dotted(key), **values}


def _to_json(value: Any) -> Any:
    """Return a value with lists for tuples, and Python's numbers for NumPy's."""
    if isinstance(value, dict):
        return {name: _to_json(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_to_json, value)]
    return value.item() if isinstance(value, np.number | np.bool_) else value


def describe_change(change: dict[str, Any]) -> str:
    """Return a difference as text for people: ``lr 0.001 -> 0.0001``."""
    texts = [hide_in_urls(to_repr(change[side])) for side in ("a", "b") if side in change]
    same = len(commonprefix([*texts, ""][:2])[:-20])  # noqa: RUF071  (of texts)
    shown = [t if len(t) <= 80 else truncate("..." * (same > 0) + t[same:], 80) for t in texts]
    note = "" if len(texts) == 2 else " (new)" if "b" in change else " (removed)"
    return f"{truncate(change['name'], 80)} {' -> '.join(shown)}{note}"
