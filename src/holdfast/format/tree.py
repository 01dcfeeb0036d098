"""The tree of a state as JSON: every plain value with its type, and where the leaves hang.

A *node* is ``null``, ``true``, ``false``, a string, an integer of 64 bits, a finite float, or an
object with one member whose name says what it is:

==================  =========================================================================
``dict``            members by name; ``ordered`` the same for an OrderedDict
``items``           a dict whose keys are not all strings: ``[[key, value], ...]``, ``of`` which
``list`` ``tuple`` ``set`` ``frozenset``   the elements
``int`` ``float``   what JSON cannot say: long integers in hexadecimal; ``nan inf -inf``
``complex`` ``bytes`` ``bytearray`` ``scalar``   numbers as pairs; bytes in base64; NumPy scalars
``tensor`` ``array`` ``blob``   a leaf: its bytes are in the shards, under the node's own key
``tied``            the same tensor as the leaf whose key it holds
``sparse``          a sparse tensor: its parts are leaves under the node's key
==================  =========================================================================

A key is the path to a node: levels joined by ``/``. What is none of these is refused by name, at
save time: nothing is pickled, and nothing comes back as something else. ``format/validate.py``
checks a tree that comes from outside; ``decode`` and ``walk`` are for one that was checked.
"""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite, nan
from typing import Any

import numpy as np

from holdfast.errors import ManifestInvalid, Unsupported
from holdfast.format.names import escape_level, join_key
from holdfast.text import with_article
from holdfast.types import DTYPES

Node = Any
EncodeOther = Callable[[Any, str, int], Node]
"""Makes the node of a value that is not plain, from value, key and depth."""
DecodeLeaf = Callable[[Node, str], Any]
"""Gives the value of a leaf, from node and key."""

MAX_DEPTH = 100
MAX_DIMENSIONS = 64
"""NumPy's own limit."""

LEAF_TAGS = ("tensor", "array", "blob")
_INT64_LIMIT = 1 << 63
_SEQUENCE_TAGS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_SEQUENCE_TYPES: dict[str, Callable[[Any], Any]] = {n: t for t, n in _SEQUENCE_TAGS.items()}
_FLOATS = {"nan": nan, "inf": inf, "-inf": -inf}
_HEX = re.compile("-?0x[0-9a-f]+")
_DESCR = re.compile(r"[<>|][biufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}(/[0-9]{1,9})?\])?")
_DICT_TAGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_PLAIN = frozenset(
    {str, type(None), bool, int, float, complex, bytes, bytearray, *_SEQUENCE_TAGS, *_DICT_TAGS}
)
_DICT_TYPES: dict[str, Callable[[], Any]] = {n: t for t, n in _DICT_TAGS.items()}


# -- values to nodes -----------------------------------------------------------------------------


def encode(value: Any, key: str, encode_other: EncodeOther, depth: int = 0) -> Node:
    """``value`` as a node. ``other(value, key, depth)`` is asked for all that is not plain; it
    returns a node or raises ``Unsupported``."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise unsupported(value, key, f"nested deeper than {MAX_DEPTH} levels, or within itself")
    if kind not in _PLAIN:
        return (
            _encode_scalar(value, key)
            if isinstance(value, np.generic)
            else encode_other(value, key, depth)
        )
    if kind is str:
        return _check_text(value, key)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if is_int64(value) else {"int": hex(value)}
    if kind is float:
        return value if isfinite(value) else {"float": repr(value)}
    if kind in _DICT_TAGS:
        return _encode_dict(value, key, encode_other, depth)
    if kind in _SEQUENCE_TAGS:
        return _encode_sequence(value, key, encode_other, depth)
    if kind is complex:
        return {"complex": [encode(v, key, encode_other) for v in (value.real, value.imag)]}
    if len(value) < 4096:
        return {kind.__name__: base64.b64encode(value).decode()}
    return encode_other(value, key, depth)


def _encode_dict(value: Any, key: str, encode_other: EncodeOther, depth: int) -> Node:
    name = _DICT_TAGS[type(value)]
    extra = {k: v for k, v in getattr(value, "__dict__", {}).items() if k != "_metadata"}
    if extra:
        raise unsupported(value, key, f"it carries the attributes {sorted(extra)}")
    try:
        levels = child_keys(list(value), key)
    except ValueError as e:
        raise unsupported(value, key, f"a key of it has no text: {e}") from e
    children = [
        encode(v, k, encode_other, depth + 1) for k, v in zip(levels, value.values(), strict=True)
    ]
    node: Node
    if name != "counter" and all(type(k) is str for k in value):
        _check_text("".join(value), key)
        node = {name: dict(zip(value, children, strict=True))}
    else:
        keys = [encode(k, key, _reject_key, depth + 1) for k in value]
        node = {"items": [list(pair) for pair in zip(keys, children, strict=True)], "of": name}
    metadata = getattr(value, "_metadata", None)
    if metadata is not None:
        # module.state_dict() hangs its version numbers on the dict; load_state_dict reads them
        node["metadata"] = encode(metadata, join_key(key, "~metadata"), reject_value, depth + 1)
    return node


def _encode_sequence(value: Any, key: str, encode_other: EncodeOther, depth: int) -> Node:
    name = _SEQUENCE_TAGS[type(value)]
    if name in ("set", "frozenset"):
        nodes = [encode(v, key, _reject_key, depth + 1) for v in value]
        return {name: sorted(nodes, key=repr)}
    if all(type(v) is int and is_int64(v) for v in value):
        return {name: list(value)}
    return {
        name: [
            encode(v, join_key(key, str(i)), encode_other, depth + 1) for i, v in enumerate(value)
        ]
    }


def _encode_scalar(value: np.generic, key: str) -> Node:
    try:
        descr = to_descr(value.dtype)
    except ValueError as e:
        raise unsupported(value, key, str(e)) from e
    raw = value.tobytes()[: value.dtype.itemsize]  # NumPy gives a byte for an empty text
    return {"scalar": [descr, base64.b64encode(raw).decode()]}


def _reject_key(value: Any, key: str, depth: int) -> Node:
    raise unsupported(value, key, "a key of a dict or a member of a set must be a plain value")


def _check_text(text: str, key: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise unsupported(text, key, "its text has lone surrogates, which UTF-8 lacks") from e
    return text


def unsupported(value: Any, key: str, why: str) -> Unsupported:
    """The refusal of one value, by its key and type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return Unsupported(
        f"{key[:300] or 'The state'!r} is {with_article(kind)} that cannot be kept faithfully:"
        f" {why}",
        todo="Turn it into tensors, arrays, numbers, strings, lists and dicts, or give the object"
        " state_dict() and load_state_dict()",
        leaf=key,
    )


def is_int64(value: int) -> bool:
    """Whether an integer stands as itself: one of 64 bits, signed."""
    return -_INT64_LIMIT <= value < _INT64_LIMIT


def reject_value(value: Any, key: str, depth: int = 0) -> Node:
    """For ``encode``: where there may be plain values only."""
    raise unsupported(value, key, "only plain values can stand here")


def child_keys(keys: list[Any], parent: str) -> list[str]:
    """The leaf keys of a dict's members, in its order. Dict keys that are equal as text (1 and
    "1") are told apart by ``~2``, ``~3`` ..., which no escaped text contains."""
    prefix = f"{parent}/" if parent else ""
    made = [prefix + escape_level(k if type(k) is str else _key_text(k)) for k in keys]
    if len(set(made)) < len(made):
        seen: Counter[str] = Counter()
        for i, k in enumerate(made):
            seen[k] += 1
            made[i] = k if seen[k] == 1 else f"{k}~{seen[k]}"
    return made


def _key_text(key: Any) -> str:
    """A key of a dict as text, the same in every process and with every NumPy."""
    if type(key) is tuple:
        several = [repr(v) if type(v) is str else _key_text(v) for v in key]
        return f"({', '.join(several)}{',' * (len(key) == 1)})"
    if type(key) is frozenset:
        return f"{{{', '.join(sorted(map(_key_text, key)))}}}"
    return str(key)


# -- nodes to values -----------------------------------------------------------------------------


def decode(node: Node, key: str, decode_leaf: DecodeLeaf, depth: int = 0) -> Any:
    """The value of a node. ``leaf(node, key)`` is asked for tensors, arrays, blobs and the like.

    Raises ``ManifestInvalid`` for a node that is none of those above.
    """
    if type(node) is not dict:
        if type(node) is list:
            raise invalid_node(node, key)
        return node
    if depth > MAX_DEPTH:
        raise invalid_node("nodes nested too deep", key)
    tag = next(iter(node), "")
    body: Any = node.get(tag)
    try:
        if tag in ("dict", "ordered", "items"):
            return _decode_dict(node, key, decode_leaf, depth)
        if (tag in _SEQUENCE_TYPES or tag in _DECODERS) and len(node) > 1:
            raise invalid_node(node, key)
        if tag in _SEQUENCE_TYPES:
            return _decode_sequence(tag, body, key, decode_leaf, depth)
        if tag in _DECODERS:
            return _DECODERS[tag](body)
        if tag in LEAF_TAGS or tag in ("tied", "sparse"):
            return decode_leaf(node, key)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        raise invalid_node(node, key) from e
    raise invalid_node(node, key)


def _decode_sequence(tag: str, body: Any, key: str, decode_leaf: DecodeLeaf, depth: int) -> Any:
    if type(body) is not list:
        raise invalid_node({tag: body}, key)
    made = _SEQUENCE_TYPES[tag](
        decode(n, join_key(key, str(i)), decode_leaf, depth + 1) for i, n in enumerate(body)
    )
    if len(made) < len(body):
        raise invalid_node({tag: body}, key)
    return made


def _decode_int(body: Any) -> int:
    if not _HEX.fullmatch(body) or is_int64(made := int(body, 16)):
        raise ValueError("no long integer")
    return made


def _decode_complex(body: Any) -> complex:
    real, imag = (decode(n, "", reject_leaf) for n in body)
    if type(real) is not float or type(imag) is not float:
        raise TypeError("no two floats")
    return complex(real, imag)


def _decode_bytes(body: Any) -> bytes:
    return base64.b64decode(body.encode("ascii"), validate=True)


def _decode_scalar(body: Any) -> Any:
    descr, text = body
    dtype, raw = from_descr(descr), _decode_bytes(text)
    if dtype.itemsize != len(raw):
        raise ValueError("bytes of another length")
    return np.ndarray((), dtype, bytearray(raw))[()]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": lambda body: _FLOATS[body],
    "complex": _decode_complex,
    "bytes": _decode_bytes,
    "bytearray": lambda body: bytearray(_decode_bytes(body)),
    "scalar": _decode_scalar,
}


def _decode_dict(node: Node, key: str, decode_leaf: DecodeLeaf, depth: int) -> Any:
    made = _DICT_TYPES[node["of"] if "items" in node else next(iter(node))]()
    for name, child, k in children(node, key):
        made[name] = decode(child, k, decode_leaf, depth + 1)
    if "metadata" in node:
        made._metadata = decode(
            node["metadata"], join_key(key, "~metadata"), decode_leaf, depth + 1
        )
    return made


def children(node: Node, key: str) -> list[tuple[Any, Node, str]]:
    """The members of a dict's node: key in the dict, node, key of the leaf."""
    if "items" in node:
        names = [decode(k, key, reject_leaf) for k, _ in node["items"]]
        nodes = [n for _, n in node["items"]]
    else:
        members = node[next(iter(node))]
        names, nodes = list(members), list(members.values())
    return list(zip(names, nodes, child_keys(names, key), strict=True))


def walk(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Every node that is not a container, with its key, in order: leaves and plain values."""
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered", "items"):
        for _, child, k in children(node, key):
            yield from walk(child, k)
    elif tag in ("list", "tuple"):
        for i, child in enumerate(node[tag]):
            yield from walk(child, join_key(key, str(i)))
    elif tag == "sparse":
        for name, part in node["sparse"]["parts"].items():
            yield join_key(key, name), part
    else:
        yield key, node


def is_valid_shape(dtype: str, shape: Sequence[Any]) -> bool:
    """Whether a leaf can have this dtype and shape: at most 64 dimensions and, each empty one
    taken as 1, fewer than 2**62 bytes, so that no library's arithmetic overflows."""
    known = DTYPES.get(dtype)
    if known is None or len(shape) > MAX_DIMENSIONS:
        return False
    size = known.itemsize
    for n in shape:
        if type(n) is not int or n < 0:
            return False
        size *= n or 1
    return size < 1 << 62


def to_descr(dtype: np.dtype[Any]) -> Any:
    """A NumPy dtype as JSON. Raises ``ValueError`` for one that would not come back the same."""
    if dtype.hasobject or dtype.isbuiltin == 2 or _has_metadata(dtype):
        raise ValueError(f"the dtype {dtype} has no bytes that can be written")

    def lists(descr: Any) -> Any:
        return [lists(d) for d in descr] if isinstance(descr, list | tuple) else descr

    descr = lists(np.lib.format.dtype_to_descr(dtype))
    back = from_descr(descr)
    if back != dtype or back.type is not dtype.type:
        raise ValueError(f"the dtype {dtype} cannot be written down")
    return descr


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype, or one within it, carries what ``.npy`` headers do not say."""
    inner = [f[0] for f in (dtype.fields or {}).values()]
    inner += [dtype.subdtype[0]] if dtype.subdtype else []
    return bool(dtype.metadata) or any(map(_has_metadata, inner))


def from_descr(descr: Any) -> np.dtype[Any]:
    """The way back. Raises ``ValueError`` or ``TypeError`` for what is no plain dtype."""

    def plain(d: Any, depth: int) -> Any:
        if type(d) is str and _DESCR.fullmatch(d):
            return d
        if type(d) is not list or depth > 16:
            raise ValueError("no dtype that NumPy writes")
        fields = []
        for name, inner, *shape in d:
            title = tuple(name) if type(name) is list else name
            fields.append((title, plain(inner, depth + 1), *map(tuple, shape)))
        return fields

    dtype = np.lib.format.descr_to_dtype(plain(descr, 0))
    if dtype.hasobject or dtype.subdtype is not None:
        raise ValueError("a dtype with objects is never loaded")
    return dtype


def reject_leaf(node: Node, key: str) -> Any:
    raise invalid_node(node, key)


def invalid_node(node: Node, key: str, file: str | None = None) -> ManifestInvalid:
    """The error for what is no node of a tree, by its key."""
    return ManifestInvalid(
        f"The tree of {file or 'the manifest'} breaks the format at {key[:300]!r}",
        expected="a node as docs/format.md has them",
        found=describe_node(node),
        todo="Take another version; this one was not written by a correct Holdfast",
        file=file,
        leaf=key,
    )


def describe_node(node: Node) -> str:
    """A node for a message: short, whatever it is."""
    if type(node) in (dict, list):
        first = ", ".join(str(n)[:20] for n in list(node)[:3] if type(n) in (str, int))
        return f"{type(node).__name__} of {len(node)}: {first}"
    return repr(node[:60] if type(node) is str else node)[:80]
