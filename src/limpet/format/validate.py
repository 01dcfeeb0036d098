"""Complete validation of the tree of a manifest, before anything is created from it.

A tree that passes can be decoded, and decoding needs no more memory than the bytes of its leaves. A
tree that fails raises ``ManifestInvalid``, which names the file and the key. ``format/tree.py``
defines the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from limpet.errors import ManifestInvalid
from limpet.format import torch_types
from limpet.format.names import join_key
from limpet.format.numpy_dtypes import from_descr
from limpet.format.tree import (
    LEAF_TAGS,
    MAX_DEPTH,
    Node,
    children,
    decode,
    invalid_node,
    is_int64,
    is_valid_shape,
    parts,
    reject_leaf,
)

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
    """Check a tree, and return the dtype and global shape of each leaf in the shards, by key.

    Raises ``ManifestInvalid`` for anything that ``format/tree.py`` does not write: an unknown node
    or dtype, an invalid shape, a duplicate key, or a tied leaf without its target.
    """
    checker = _Checker(file)
    if type(node) is not dict or next(iter(node), None) not in ("dict", "items"):
        raise invalid_node(node, "", file)
    checker.check_node(node, "", 0)
    for key, target in checker.tied:
        if type(target) is not str or target not in checker.tensors:
            raise invalid_node({"tied": target}, key, file)
    return checker.leaves


def check_plain(node: Node, key: str, file: str) -> None:
    """Check a dict that may contain only plain values, like ``check_tree``."""
    checker = _Checker(file)
    if type(node) is not dict or next(iter(node), None) != "dict":
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
            or len(body) > (3 if tag == "array" else 2)
            or type(shape) is not list
            or not is_valid_shape(dtype, shape)
            or (tag == "array" and dtype.startswith(_NOT_IN_NUMPY))
        ):
            return False
        if len(body) == 3 and (dtype, from_descr(body[2]).itemsize) != ("uint8", shape[-1]):
            return False
        if tag == "tensor":
            self.tensors.add(key)
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
