"""The tree of a state as JSON: every plain value with its type, and where the leaves hang.

A *node* is ``null``, ``true``, ``false``, a string, an integer of 64 bits, a finite float, or an
object with one member whose name says what it is:

==================  =========================================================================
``dict``            members by name; ``ordered`` the same for an OrderedDict
``items``           a dict whose keys are not all strings: ``[[key, value], ...]``, ``of`` which
``list`` ``tuple`` ``set`` ``frozenset``   the elements
``int`` ``float``   what JSON cannot say: long integers, ``nan``, ``inf``, ``-inf``
``complex`` ``bytes`` ``bytearray`` ``scalar``   numbers as pairs; bytes in base64; NumPy scalars
``tensor`` ``array`` ``blob``   a leaf: its bytes are in the shards, under the node's own key
``tied``            the same tensor as the leaf whose key it holds
``sparse``          a sparse tensor: its parts are leaves under the node's key
==================  =========================================================================

A key is the path to a node: levels joined by ``/``. What is none of these is refused by name, at
save time: nothing is pickled, and nothing comes back as something else.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

import numpy as np

from holdfast.errors import ManifestInvalid, Unsupported
from holdfast.format.names import escape, join
from holdfast.words import DTYPES

Node = Any
Path = Callable[[Node, str], Any]

MAX_DEPTH = 100
LEAVES = ("tensor", "array", "blob")
_LONG = 1 << 63
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_BUILD: dict[str, Callable[[Any], Any]] = {n: t for t, n in _SEQUENCES.items()}
_NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_PLAIN = frozenset(
    {str, type(None), bool, int, float, complex, bytes, bytearray, *_SEQUENCES, *_DICTS}
)
_NEW_DICT: dict[str, Callable[[], Any]] = {n: t for t, n in _DICTS.items()}


# -- values to nodes -----------------------------------------------------------------------------


def encode(value: Any, key: str, other: Path, depth: int = 0) -> Node:
    """``value`` as a node. ``other(value, key)`` is asked for all that is not plain; it returns a
    node or raises ``Unsupported``."""
    kind = type(value)
    if kind not in _PLAIN:
        return _encode_scalar(value, key) if isinstance(value, np.generic) else other(value, key)
    if kind is str:
        return _checked_text(value, key)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_LONG <= value < _LONG else {"int": str(value)}
    if kind is float:
        return value if isfinite(value) else {"float": repr(value)}
    if depth > MAX_DEPTH:
        raise unsupported(value, key, f"nested deeper than {MAX_DEPTH} levels, or within itself")
    if kind in _DICTS:
        return _encode_dict(value, key, other, depth)
    if kind in _SEQUENCES:
        return _encode_sequence(value, key, other, depth)
    if kind is complex:
        return {"complex": [encode(v, key, other) for v in (value.real, value.imag)]}
    if len(value) < 4096:
        return {kind.__name__: base64.b64encode(value).decode()}
    return other(value, key)


def _encode_dict(value: Any, key: str, other: Path, depth: int) -> Node:
    name = _DICTS[type(value)]
    extra = {k: v for k, v in getattr(value, "__dict__", {}).items() if k != "_metadata"}
    if extra:
        raise unsupported(value, key, f"it carries the attributes {sorted(extra)}")
    levels = child_keys(list(value), key)
    children = [encode(v, k, other, depth + 1) for k, v in zip(levels, value.values(), strict=True)]
    node: Node
    if name != "counter" and all(type(k) is str for k in value):
        node = {name: {_checked_text(k, key): c for k, c in zip(value, children, strict=True)}}
    else:
        keys = [encode(k, key, _refuse_key, depth + 1) for k in value]
        node = {"items": [list(pair) for pair in zip(keys, children, strict=True)], "of": name}
    metadata = getattr(value, "_metadata", None)
    if metadata is not None:
        # module.state_dict() hangs its version numbers on the dict; load_state_dict reads them
        node["metadata"] = encode(metadata, join(key, "~metadata"), other, depth + 1)
    return node


def _encode_sequence(value: Any, key: str, other: Path, depth: int) -> Node:
    name = _SEQUENCES[type(value)]
    if name in ("set", "frozenset"):
        nodes = [encode(v, key, _refuse_key, depth + 1) for v in value]
        return {name: sorted(nodes, key=repr)}
    if all(type(v) is int and -_LONG <= v < _LONG for v in value):
        return {name: list(value)}
    return {name: [encode(v, join(key, str(i)), other, depth + 1) for i, v in enumerate(value)]}


def _encode_scalar(value: np.generic, key: str) -> Node:
    if value.dtype.hasobject or value.dtype.isbuiltin == 2:
        raise unsupported(value, key, "its dtype cannot be written down")
    raw = np.asarray(value).tobytes()
    return {"scalar": [to_descr(value.dtype), base64.b64encode(raw).decode()]}


def _refuse_key(value: Any, key: str) -> Node:
    raise unsupported(value, key, "a key of a dict or a member of a set must be a plain value")


def _checked_text(text: str, key: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise unsupported(text, key, "its text has lone surrogates, which UTF-8 lacks") from e
    return text


def unsupported(value: Any, key: str, why: str) -> Unsupported:
    """The refusal of one value, by its key and type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return Unsupported(
        f"{key[:300] or 'The state'!r} is a {kind} that cannot be kept faithfully: {why}",
        todo="Turn it into tensors, arrays, numbers, strings, lists and dicts, or give the object"
        " state_dict() and load_state_dict()",
        leaf=key,
    )


def refuse(value: Any, key: str) -> Node:
    """For ``encode``: where there may be plain values only."""
    raise unsupported(value, key, "only plain values can stand here")


def child_keys(keys: list[Any], parent: str) -> list[str]:
    """The leaf keys of a dict's members, in its order. Dict keys that are equal as text (1 and
    "1") are told apart by ``~2``, ``~3`` ..., which no escaped text contains."""
    prefix = f"{parent}/" if parent else ""
    made = [prefix + escape(k if type(k) is str else str(k)) for k in keys]
    if len(set(made)) < len(made):
        seen: Counter[str] = Counter()
        for i, k in enumerate(made):
            seen[k] += 1
            made[i] = k if seen[k] == 1 else f"{k}~{seen[k]}"
    return made


# -- nodes to values -----------------------------------------------------------------------------


def decode(node: Node, key: str, leaf: Path, depth: int = 0) -> Any:
    """The value of a node. ``leaf(node, key)`` is asked for tensors, arrays, blobs and the like.

    Raises ``ManifestInvalid`` for a node that is none of those above.
    """
    if type(node) is not dict:
        if type(node) is list or depth > MAX_DEPTH:
            raise _no_node(node, key)
        return node
    tag = next(iter(node), "")
    body: Any = node.get(tag)
    try:
        if tag in ("dict", "ordered", "items"):
            return _decode_dict(node, key, leaf, depth)
        if tag in _BUILD:
            values = (decode(n, join(key, str(i)), leaf, depth + 1) for i, n in enumerate(body))
            return _BUILD[tag](values)
        if tag in _NUMBERS:
            return _NUMBERS[tag](body)
        if tag == "complex":
            return complex(*(decode(n, key, leaf, depth + 1) for n in body))
        if tag in ("bytes", "bytearray"):
            raw = base64.b64decode(body, validate=True)
            return raw if tag == "bytes" else bytearray(raw)
        if tag == "scalar":
            return np.frombuffer(base64.b64decode(body[1]), from_descr(body[0]), 1)[0]
        if tag in LEAVES or tag in ("tied", "sparse"):
            return leaf(node, key)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        raise _no_node(node, key) from e
    raise _no_node(node, key)


def _decode_dict(node: Node, key: str, leaf: Path, depth: int) -> Any:
    made = _NEW_DICT[node["of"] if "items" in node else next(iter(node))]()
    for name, child, k in children(node, key):
        made[name] = decode(child, k, leaf, depth + 1)
    if "metadata" in node:
        made._metadata = decode(node["metadata"], join(key, "~metadata"), leaf, depth + 1)
    return made


def children(node: Node, key: str) -> list[tuple[Any, Node, str]]:
    """The members of a dict's node: key in the dict, node, key of the leaf."""
    if "items" in node:
        names = [decode(k, key, _refuse_leaf) for k, _ in node["items"]]
        nodes = [n for _, n in node["items"]]
    else:
        members = node[next(iter(node))]
        names, nodes = list(members), list(members.values())
    return list(zip(names, nodes, child_keys(names, key), strict=True))


def walk(node: Node, key: str = "", depth: int = 0) -> Iterator[tuple[str, Node]]:
    """Every node that is not a container, with its key, in order: leaves and plain values."""
    tag = next(iter(node), None) if type(node) is dict else None
    if depth > MAX_DEPTH:
        raise _no_node(node, key)
    try:
        if tag in ("dict", "ordered", "items"):
            for _, child, k in children(node, key):
                yield from walk(child, k, depth + 1)
        elif tag in ("list", "tuple"):
            for i, child in enumerate(node[tag]):
                yield from walk(child, join(key, str(i)), depth + 1)
        elif tag == "sparse":
            for name, part in node["sparse"]["parts"].items():
                yield join(key, name), part
        else:
            yield key, node
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise _no_node(node, key) from e


def leaves(node: Node) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All leaves with bytes in the shards: key to dtype and global shape. Validates them.

    Raises ``ManifestInvalid`` for an unknown dtype, a bad shape, a key that stands twice, or a
    tied leaf whose other half is not there.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    tied: list[tuple[str, Any]] = []
    for key, n in walk(node):
        tag = next(iter(n), None) if type(n) is dict else None
        if tag == "tied":
            tied.append((key, n["tied"]))
        elif tag in LEAVES:
            if key in found:
                raise _no_node(n, key)
            found[key] = dtype_and_shape(n, key)
    for key, target in tied:
        if type(target) is not str or target not in found:
            raise _no_node({"tied": target}, key)
    return found


def dtype_and_shape(node: Node, key: str) -> tuple[str, tuple[int, ...]]:
    """What a leaf's node says of its bytes. Raises ``ManifestInvalid``."""
    body = node[next(iter(node))]
    if "blob" in node and type(body) is list and len(body) == 2 and type(body[1]) is int:
        body = ["uint8", [body[1]]]
    try:
        dtype, shape = body[0], tuple(body[1])
        good = dtype in DTYPES and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    except (TypeError, KeyError, IndexError) as e:
        raise _no_node(node, key) from e
    if not good:
        raise _no_node(node, key)
    return dtype, shape


def to_descr(dtype: np.dtype[Any]) -> Any:
    """A NumPy dtype as JSON (lists for tuples)."""
    return np.lib.format.dtype_to_descr(dtype)


def from_descr(descr: Any) -> np.dtype[Any]:
    """The way back. Raises ``ValueError`` or ``TypeError`` for what is no plain dtype."""

    def tuples(d: Any) -> Any:
        if type(d) is not list:
            return d
        fields = []
        for f in d:
            name = tuple(f[0]) if type(f[0]) is list else f[0]
            shape = (tuple(f[2]),) if len(f) > 2 else ()
            fields.append((name, tuples(f[1]), *shape))
        return fields

    dtype = np.lib.format.descr_to_dtype(tuples(descr))
    if dtype.hasobject:
        raise ValueError("a dtype with objects is never loaded")
    return dtype


def _refuse_leaf(node: Node, key: str) -> Any:
    raise _no_node(node, key)


def _no_node(node: Node, key: str) -> ManifestInvalid:
    return ManifestInvalid(
        f"The tree of the manifest breaks the format at {key[:300]!r}",
        expected="a node as docs/format.md has them",
        found=repr(node)[:200],
        leaf=key,
    )
