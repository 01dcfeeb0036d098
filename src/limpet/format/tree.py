"""The tree of a state as JSON: every plain value with its type, and the positions of the leaves.

A *node* is ``null``, ``true``, ``false``, a string, a 64-bit integer, a finite float, or an object
whose first member is a tag that names its type:

==================  =========================================================================
``dict``            members by name; ``ordered`` is the same for an OrderedDict
``items``           a dict with other keys than strings: ``[[key, value], ...]``; ``of``: its type
``list`` ``tuple`` ``set`` ``frozenset``   the elements
``int`` ``float``   numbers that JSON lacks: long integers in hexadecimal; ``nan inf -inf``
``complex`` ``bytes`` ``bytearray`` ``scalar``   numbers as pairs; bytes in base64; NumPy scalars
``tensor`` ``array`` ``blob``   a leaf: its bytes are in the shards, under the node's own key
``tied``            the same tensor as the leaf with this key
``sparse``          a sparse tensor: its parts are leaves under the node's key
``dtype`` ``device`` ``size``   of torch: a name, a name with a number, numbers
``subclass``        a tensor of another class: its inner tensors are below the node's key
==================  =========================================================================

A key is the path to a node: levels joined by ``/``. A value of any other type is rejected by key at
save time: nothing is pickled, and no value changes its type. ``check_tree`` checks a tree from
outside, before anything is created from it; ``decode`` and ``walk`` expect a checked tree.
"""

from __future__ import annotations

import base64
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from typing import Any

import numpy as np

from limpet.errors import ManifestInvalid, Unsupported
from limpet.format import torch_types
from limpet.format.names import escape_level, join_key
from limpet.format.numpy_dtypes import from_descr, to_descr
from limpet.format.rejected import (
    collect,
    ends_search,
    list_all,
    nested_too_deeply,
    unsupported,
)
from limpet.types import DTYPES

Node = Any
EncodeOther = Callable[[Any, str, int], Node]
"""Returns the node of a value that is not plain, from value, key, and depth."""
DecodeLeaf = Callable[[Node, str], Any]
"""Returns the value of a leaf, from node and key."""

MAX_DEPTH = 100
MAX_DIMENSIONS = 64
"""The limit of NumPy."""

LEAF_TAGS = ("tensor", "array", "blob")
_BYTE_TAGS = (*LEAF_TAGS, "tied")
OTHER_MODULES = "."
"""The name, in the metadata of a module's state dict, of the entry of all modules without one."""

PART_TAGS = ("sparse", "subclass")
"""The tags of tensors whose parts are below the node's key."""
_TENSOR_TAGS = ("tied", *PART_TAGS)
_INT64_LIMIT = 1 << 63
_SEQUENCE_TAGS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_SEQUENCE_TYPES: dict[str, Callable[[Any], Any]] = {n: t for t, n in _SEQUENCE_TAGS.items()}
_FLOATS = ("nan", "inf", "-inf")
_NAN_BITS = struct.pack(">d", nan).hex()
_ANY_TEXT = "surrogatepass"
_HEX = re.compile("-?0x[0-9a-f]+")
_DICT_TAGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_PLAIN = frozenset(
    {str, type(None), bool, int, float, complex, bytes, bytearray, *_SEQUENCE_TAGS, *_DICT_TAGS}
)
_DICT_TYPES: dict[str, Callable[[], Any]] = {n: t for t, n in _DICT_TAGS.items()}


# -- values to nodes -----------------------------------------------------------------------------


def encode_root(value: Any, key: str, encode_other: EncodeOther) -> Node:
    """Return ``value`` as a node, or raise one error that lists all that cannot be saved."""
    try:
        return encode(value, key, encode_other)
    except Unsupported as e:
        if (error := list_all(e)) is e:
            raise
        raise error from e


def encode(value: Any, key: str, encode_other: EncodeOther, depth: int = 0) -> Node:
    """Return ``value`` as a node. ``encode_other(value, key, depth)`` returns the node of what is
    not plain, or raises ``Unsupported``."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise nested_too_deeply(
            value, key, f"it is nested deeper than {MAX_DEPTH} levels, or contains itself"
        )
    if kind not in _PLAIN:
        if isinstance(value, np.generic):
            return _encode_scalar(value, key)
        return encode_other(value, key, depth)
    if kind in _DICT_TAGS:
        return _encode_dict(value, key, encode_other, depth)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as e:
            why = "its text contains lone surrogates, which UTF-8 cannot encode"
            advice = 'Save text.encode("utf-8", "surrogatepass")'
            raise unsupported(value, key, why, advice) from e
        return value
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if is_int64(value) else {"int": hex(value)}
    if kind is float:
        return value if isfinite(value) else {"float": _encode_special(value)}
    if kind in _SEQUENCE_TAGS:
        return _encode_sequence(value, key, encode_other, depth)
    if kind is complex:
        return {"complex": [encode(v, key, encode_other) for v in (value.real, value.imag)]}
    if len(value) < 4096:
        return {kind.__name__: base64.b64encode(value).decode()}
    return encode_other(value, key, depth)


def _encode_dict(value: Any, key: str, encode_other: EncodeOther, depth: int) -> Node:
    name = _DICT_TAGS[type(value)]
    if extra := getattr(value, "__dict__", {}).keys() - {"_metadata"}:
        why = f"it has the attributes {sorted(extra)}"
        raise unsupported(value, key, why, "Save dict(value), and these attributes beside it")
    names = list(value)
    try:
        levels = child_keys(names, key)
    except ValueError as e:
        raise unsupported(value, key, f"one of its keys cannot be converted to text: {e}") from e
    children = _encode_members(value.values(), levels, encode_other, depth + 1)
    if name != "counter" and {*map(type, names)} <= {str}:
        encode("".join(names), key, _reject_key)
        node: Node = {name: dict(zip(names, children, strict=True))}
    else:
        if any(map(_differs_from_itself, names)):
            why = "no load could find a key that is not equal to itself, such as NaN"
            raise unsupported(value, key, why, "Use None or a string as the key")
        keys = [encode(k, key, _reject_key, depth + 1) for k in names]
        node = {"items": [list(pair) for pair in zip(keys, children, strict=True)], "of": name}
    if (metadata := getattr(value, "_metadata", None)) is not None:
        # module.state_dict() attaches version numbers to the dict; load_state_dict reads them
        node["metadata"] = encode(metadata, join_key(key, "~metadata"), reject_value, depth + 1)
    return node


def _encode_sequence(value: Any, key: str, encode_other: EncodeOther, depth: int) -> Node:
    name = _SEQUENCE_TAGS[type(value)]
    if name in ("set", "frozenset"):
        nodes = [encode(v, key, _reject_key, depth + 1) for v in value]
        return {name: sorted(nodes, key=repr)}
    if all(type(v) is int and is_int64(v) for v in value):
        return {name: list(value)}
    keys = [join_key(key, str(i)) for i in range(len(value))]
    return {name: _encode_members(value, keys, encode_other, depth + 1)}


def _encode_members(
    values: Iterable[Any], keys: list[str], encode_other: EncodeOther, depth: int
) -> list[Node]:
    """Encode the members of a container. A member that cannot be saved does not end the search for
    others, so that the error has all of them."""
    nodes, errors = [], []
    for value, key in zip(values, keys, strict=True):
        try:
            nodes.append(encode(value, key, encode_other, depth))
        except Unsupported as e:
            if ends_search(e):
                raise
            errors.append(e)
    if errors:
        raise collect(errors)
    return nodes


def _encode_special(value: float) -> str:
    """Return an infinity as text; a NaN with other bits than ``math.nan`` as its bits."""
    bits = struct.pack(">d", value).hex()
    return bits if isnan(value) and bits != _NAN_BITS else repr(value)


def _differs_from_itself(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return any(map(_differs_from_itself, key))
    return bool(key != key)  # noqa: PLR0124


def _encode_scalar(value: np.generic, key: str) -> Node:
    try:
        descr = to_descr(value.dtype)
    except ValueError as e:
        raise unsupported(value, key, str(e)) from e
    raw = value.tobytes()[: value.dtype.itemsize]  # NumPy returns one byte for an empty string
    return {"scalar": [descr, base64.b64encode(raw).decode()]}


def _reject_key(value: Any, key: str, depth: int) -> Node:
    why = "a key of a dict or a member of a set must be a plain value"
    advice = "Save tuple(value.flatten().tolist())" if hasattr(type(value), "flatten") else ""
    raise unsupported(value, key, why, advice)


def is_int64(value: int) -> bool:
    """Return True if an integer fits into 64 bits, signed, so that its node is the number."""
    return -_INT64_LIMIT <= value < _INT64_LIMIT


def reject_value(value: Any, key: str, depth: int = 0) -> Node:
    """Reject a value: an ``encode_other`` for places where only plain values are allowed."""
    raise unsupported(value, key, "only plain values are allowed here")


def child_keys(keys: list[Any], parent: str) -> list[str]:
    """Return the leaf keys of a dict's members, in order. Dict keys with equal text (1 and "1") get
    the suffixes ``~2``, ``~3``, and so on, which no escaped text contains."""
    prefix = f"{parent}/" if parent else ""
    if {*map(type, keys)} == {str} and all(keys) and escape_level(s := "".join(keys)) == s:
        return [prefix + k for k in keys]  # the usual names: all differ, and none is escaped
    result = [prefix + escape_level(k if type(k) is str else _key_text(k)) for k in keys]
    if len(set(result)) < len(result):
        seen: Counter[str] = Counter()
        for i, k in enumerate(result):
            seen[k] += 1
            result[i] = k if seen[k] == 1 else f"{k}~{seen[k]}"
    return result


def _key_text(key: Any, depth: int = 0) -> str:
    """Return a key of a dict as text, the same in every process and with every NumPy version."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if type(key) is tuple:
        texts = [repr(v) if type(v) is str else _key_text(v, depth + 1) for v in key]
        return f"({', '.join(texts)}{',' * (len(key) == 1)})"
    if type(key) is frozenset:
        return f"{{{', '.join(sorted(_key_text(v, depth + 1) for v in key))}}}"
    return str(key)


# -- nodes to values -----------------------------------------------------------------------------


def decode(node: Node, key: str, decode_leaf: DecodeLeaf, depth: int = 0) -> Any:
    """Return the value of a node. ``decode_leaf(node, key)`` decodes leaves, tied and sparse
    tensors, and torch's types. Raises ``ManifestInvalid``."""
    if type(node) is not dict:
        if type(node) is list:
            raise invalid_node(node, key)
        return node
    if depth > MAX_DEPTH:
        raise invalid_node("nodes that are nested too deeply", key)
    tag = next(iter(node), "")
    body: Any = node.get(tag)
    try:
        if tag in ("dict", "ordered", "items"):
            return _decode_dict(node, key, decode_leaf, depth)
        if tag in LEAF_TAGS or tag in _TENSOR_TAGS or tag in torch_types.TAGS:
            return decode_leaf(node, key)
        if tag in _SEQUENCE_TYPES and len(node) == 1:
            return _decode_sequence(tag, body, key, decode_leaf, depth)
        if tag in _DECODERS and len(node) == 1:
            return _DECODERS[tag](body)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        raise invalid_node(node, key) from e
    raise invalid_node(node, key)


def _decode_sequence(tag: str, body: Any, key: str, decode_leaf: DecodeLeaf, depth: int) -> Any:
    if type(body) is not list:
        raise invalid_node({tag: body}, key)
    value = _SEQUENCE_TYPES[tag](
        decode(n, join_key(key, str(i)), decode_leaf, depth + 1) for i, n in enumerate(body)
    )
    if len(value) < len(body):
        raise invalid_node({tag: body}, key)
    return value


def _decode_int(body: Any) -> int:
    if not _HEX.fullmatch(body) or is_int64(value := int(body, 16)):
        raise ValueError("not a long integer")
    return value


def _decode_float(body: Any) -> float:
    if body in _FLOATS:
        return float(body)  # a new object, because a set may have several NaN
    raw = bytes.fromhex(body)
    value: float = struct.unpack(">d", raw)[0] if len(raw) == 8 else 0.0
    if _encode_special(value) != body:
        raise ValueError("not the bits of a NaN")
    return value


def _decode_complex(body: Any) -> complex:
    real, imag = (decode(n, "", reject_leaf) for n in body)
    if type(real) is not float or type(imag) is not float:
        raise TypeError("not two floats")
    return complex(real, imag)


def _decode_bytes(body: Any) -> bytes:
    return base64.b64decode(body.encode("ascii"), validate=True)


def _decode_scalar(body: Any) -> Any:
    descr, text = body
    dtype, raw = from_descr(descr), _decode_bytes(text)
    if dtype.itemsize != len(raw):
        raise ValueError("wrong number of bytes")
    if dtype.kind == "S":  # an array drops NUL at the end
        return np.bytes_(raw)
    if dtype.kind == "U":
        return np.str_(raw.decode(f"utf-32-{'be' if dtype.str[0] == '>' else 'le'}", _ANY_TEXT))
    return np.ndarray((), dtype, bytearray(raw))[()]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "bytes": _decode_bytes,
    "bytearray": lambda body: bytearray(_decode_bytes(body)),
    "scalar": _decode_scalar,
}


def _decode_dict(node: Node, key: str, decode_leaf: DecodeLeaf, depth: int) -> Any:
    value = _DICT_TYPES[node["of"] if "items" in node else next(iter(node))]()
    for name, child, k in children(node, key):
        value[name] = decode(child, k, decode_leaf, depth + 1)
    if "metadata" in node:
        metadata = decode(node["metadata"], join_key(key, "~metadata"), decode_leaf, depth + 1)
        value._metadata = _complete_metadata(metadata, value)
    return value


def _complete_metadata(metadata: Any, names: Iterable[Any]) -> Any:
    """Return the metadata of a state dict with an entry for each module that has a member."""
    if not isinstance(metadata, dict) or not isinstance(metadata.get(OTHER_MODULES), dict):
        return metadata
    paths = dict.fromkeys(["", *(n.rpartition(".")[0] for n in names if type(n) is str)])
    others = metadata.pop(OTHER_MODULES)
    return OrderedDict({path: {**others} for path in paths} | metadata)


def children(node: Node, key: str) -> list[tuple[Any, Node, str]]:
    """Return the members of a dict's node, each as (key in the dict, node, leaf key)."""
    if "items" in node:
        names = [decode(k, key, reject_leaf) for k, _ in node["items"]]
        nodes = [n for _, n in node["items"]]
    else:
        members = node[next(iter(node))]
        names, nodes = list(members), list(members.values())
    return list(zip(names, nodes, child_keys(names, key), strict=True))


def tag_of(node: Node) -> Any:
    """Return the tag of a node, which is its first name; None for a node without a tag."""
    return next(iter(node), None) if type(node) is dict else None


def is_leaf(node: Node) -> bool:
    """Return True for the node of a leaf or of a tensor that is tied to one."""
    return tag_of(node) in _BYTE_TAGS


def is_dict(node: Node) -> bool:
    return tag_of(node) in ("dict", "ordered", "items")


def members(node: Node, key: str) -> Iterable[tuple[Node, str]] | None:
    """Return node and key of each direct member of a container; None if it is not a container."""
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered", "items"):
        return [(child, k) for _, child, k in children(node, key)]
    if tag in ("list", "tuple"):
        return ((child, join_key(key, str(i))) for i, child in enumerate(node[tag]))
    return None


def walk(node: Node, key: str = "", split_sparse: bool = True) -> Iterator[tuple[str, Node]]:
    """Yield every leaf and plain value with its key, in order. ``split_sparse``: the parts of a
    sparse tensor or a subclass, instead of the tensor."""
    open_containers = [iter([(node, key)])]  # nested generators would pass on each node again
    while open_containers:
        for child, k in open_containers[-1]:
            inner = members(child, k)
            if inner is None and split_sparse and type(child) is dict:
                inner = parts(child, k) if next(iter(child)) in PART_TAGS else None
            if inner is not None:
                open_containers.append(iter(inner))
                break
            yield k, child
        else:
            open_containers.pop()


def parts(node: Node, key: str) -> list[tuple[Node, str]]:
    """Return the parts of a tensor with one of ``PART_TAGS``, each with its key."""
    (body,) = node.values()
    return [(part, join_key(key, escape_level(name))) for name, part in body["parts"].items()]


def is_valid_shape(dtype: str, shape: Sequence[Any]) -> bool:
    """Return True if a leaf can have this dtype and shape: at most 64 dimensions and, if empty
    dimensions count as 1, fewer than 2**62 bytes, so that no library's arithmetic overflows."""
    entry = DTYPES.get(dtype)
    if entry is None or len(shape) > MAX_DIMENSIONS:
        return False
    size = entry.itemsize
    for n in shape:
        if type(n) is not int or n < 0:
            return False
        size *= n or 1
    return size < 1 << 62


def reject_leaf(node: Node, key: str) -> Any:
    raise invalid_node(node, key)


def invalid_node(node: Node, key: str, file: str | None = None) -> ManifestInvalid:
    """Return the error for an invalid node of a tree; it names the key."""
    return ManifestInvalid(
        f"The tree of {file or 'the manifest'} violates the format at {key[:300]!r}",
        expected="a node as specified in docs/format.md",
        found=describe_node(node),
        todo="Load another version; a correct Limpet did not write this one",
        file=file,
        leaf=key,
    )


def describe_node(node: Node) -> str:
    """Return a short description of any node for a message."""
    if type(node) in (dict, list):
        first = ", ".join(str(n)[:20] for n in list(node)[:3] if type(n) in (str, int))
        return f"{type(node).__name__} of {len(node)}: {first}"
    return repr(node[:60] if type(node) is str else node)[:80]


# -- validation -----------------------------------------------------------------------------------
#
# A tree that passes can be decoded, and decoding needs no more memory than the bytes of its leaves.

_DICT_FIELDS: dict[str, set[str]] = {
    "dict": {"dict"},
    "ordered": {"ordered", "metadata"},
    "items": {"items", "of", "metadata"},
}
_SPARSE_PARTS: dict[str, set[str]] = {
    "sparse_coo": {"indices", "values"},
    "sparse_csr": {"crow", "col", "values"},
    "sparse_bsr": {"crow", "col", "values"},
    "sparse_csc": {"ccol", "row", "values"},
    "sparse_bsc": {"ccol", "row", "values"},
}
_NOT_IN_NUMPY = ("bfloat16", "complex32", "float8", "float4")
_MALFORMED = (TypeError, ValueError, KeyError, IndexError, AttributeError)

LeafSpecs = dict[str, tuple[str, tuple[int, ...]]]


def check_tree(node: Node, file: str) -> LeafSpecs:
    """Return the dtype and global shape of each leaf in the shards, by key. Raises
    ``ManifestInvalid`` for anything that this module does not write."""
    checker = _Checker(file)
    if tag_of(node) not in ("dict", "items"):
        raise invalid_node(node, "", file)
    checker.check_node(node, "", 0)
    for key, target in checker.tied:
        if type(target) is not str or target not in checker.tensors:
            raise invalid_node({"tied": target}, key, file)
    return checker.leaves


def check_plain(node: Node, key: str, file: str) -> None:
    """Check a dict that may contain only plain values, like ``check_tree``."""
    checker = _Checker(file)
    if tag_of(node) != "dict":
        raise invalid_node(node, key, file)
    checker.check_node(node, key, 0)
    if not checker.is_plain:
        raise invalid_node(next(iter([*checker.leaves, *checker.tied, node])), key, file)


@dataclass(slots=True)
class _Checker:
    """The state of one validation."""

    file: str
    leaves: LeafSpecs = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    tied: list[tuple[str, Any]] = field(default_factory=list)
    has_torch_types: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether only nodes of plain values were checked."""
        return not self.leaves and not self.tied and not self.has_torch_types

    def check_node(self, node: Node, key: str, depth: int) -> None:
        if type(node) is not dict:
            if type(node) is list or (type(node) is int and not is_int64(node)):
                raise invalid_node(node, key, self.file)
            return
        if depth > MAX_DEPTH:
            raise invalid_node("nodes that are nested too deeply", key, self.file)
        try:
            valid = self._check_object(node, next(iter(node), None), key, depth)
        except (ManifestInvalid, *_MALFORMED) as e:
            if isinstance(e, ManifestInvalid) and e.fields.get("file") is not None:
                raise
            raise invalid_node(node, key, self.file) from e
        if not valid:
            raise invalid_node(node, key, self.file)

    def _check_object(self, node: Node, tag: Any, key: str, depth: int) -> bool:
        """Return True if an object node is well formed. Any error in ``_MALFORMED`` means False."""
        body = node[tag]
        if tag in _DICT_FIELDS:
            return node.keys() <= _DICT_FIELDS[tag] and self._check_dict(node, key, depth)
        if len(node) != 1:
            return False
        if tag in ("list", "tuple"):
            for i, child in enumerate(body):
                if type(child) is not int or not is_int64(child):
                    self.check_node(child, join_key(key, str(i)), depth + 1)
            return type(body) is list
        if tag in LEAF_TAGS:
            return key not in self.leaves and self._check_leaf(tag, body, key)
        if tag == "tied":
            self.tied.append((key, body))
            return True
        if tag == "sparse":
            return self._check_sparse(body, key)
        if tag == "subclass":
            return self._check_subclass(node, key, depth)
        if tag in torch_types.TAGS:
            self.has_torch_types = True
            return torch_types.is_valid(node)
        # no other node contains leaves, and it is well formed if it can be decoded
        decode(node, key, reject_leaf, depth)
        return True

    def _check_dict(self, node: Node, key: str, depth: int) -> bool:
        if "metadata" in node:
            checker = _Checker(self.file)
            checker.check_node(node["metadata"], join_key(key, "~metadata"), depth + 1)
            if not checker.is_plain or node.get("of") == "dict":
                return False
        if "items" in node and not (
            type(node["items"]) is list
            and all(type(pair) is list for pair in node["items"])
            and type(node["of"]) is str
        ):
            return False
        members = children(node, key)
        if "items" in node and len({name for name, _, _ in members}) < len(members):
            return False
        for _, child, k in members:
            self.check_node(child, k, depth + 1)
        return node.get("of", "dict") in ("dict", "ordered", "counter")

    def _check_leaf(self, tag: str, body: Any, key: str) -> bool:
        if tag == "blob":
            kind, length = body
            if kind not in ("bytes", "bytearray"):
                return False
            dtype, shape = "uint8", [length]
        else:
            dtype, shape = body[:2]
        if (
            type(body) is not list
            or len(body) > 3
            or type(shape) is not list
            or not is_valid_shape(dtype, shape)
            or (tag == "array" and dtype.startswith(_NOT_IN_NUMPY))
        ):
            return False
        if tag == "tensor":
            self.tensors.add(key)
            order = body[2] if len(body) == 3 else [*range(len(shape))]
            if not {*map(type, order)} <= {int} or sorted(order) != [*range(len(shape))]:
                return False
        elif len(body) == 3 and (dtype, from_descr(body[2]).itemsize) != ("uint8", shape[-1]):
            return False
        self.leaves[key] = dtype, tuple(shape)
        return True

    def _check_subclass(self, node: Node, key: str, depth: int) -> bool:
        self.has_torch_types = True
        body = node["subclass"]
        if body.keys() != {"class", "dtype", "shape", "context", "parts"} or not body["parts"]:
            return False
        context = _Checker(self.file)
        context.check_node(body["context"], join_key(key, "~context"), depth + 1)
        for part, k in parts(node, key):
            if next(iter(part), None) not in ("tensor", "tied", "subclass"):
                return False
            self.check_node(part, k, depth + 1)
        return (
            not context.leaves
            and not context.tied
            and type(body["class"]) is str
            and torch_types.is_valid({"dtype": body["dtype"]})
            and torch_types.is_valid({"size": body["shape"]})
        )

    def _check_sparse(self, body: Any, key: str) -> bool:
        layout, shape, by_name = body["layout"], body["shape"], body["parts"]
        if body.keys() != {"layout", "shape", "coalesced", "parts"}:
            return False
        for name, part in by_name.items():
            if next(iter(part), None) not in ("tensor", "tied"):
                return False
            self.check_node(part, join_key(key, name), 0)
        return (
            by_name.keys() == _SPARSE_PARTS[layout]
            and type(shape) is list
            and is_valid_shape("uint8", [0, *shape])
            and type(body["coalesced"]) is bool
        )
