"""torch's dtypes, devices, and sizes as nodes: ``dtype``, ``device``, and ``size``.

A node names the value, and nothing else is looked up: no code from a snapshot runs. Only decoding
imports torch.
"""

from __future__ import annotations

import re
from typing import Any

from limpet import lazy_torch
from limpet.errors import LimpetError

TAGS = frozenset({"dtype", "device", "size"})

_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,63}(:(0|[1-9][0-9]{0,2}))?")


def encode(value: Any) -> Any:
    """Return the node of a dtype, device, or size; None for any other value."""
    torch = lazy_torch.torch_or_none()
    if torch is None:
        return None
    kind, node = type(value), dict[str, Any]()
    if kind is torch.Size:
        node = {"size": list(value)}
    elif kind is torch.dtype:
        node = {"dtype": str(value).removeprefix("torch.")}
    elif kind is torch.device:
        node = {"device": str(value)}
    else:
        return None
    return node if is_valid(node) else None


def is_valid(node: Any) -> bool:
    """Return True if a node with one of ``TAGS`` is well formed."""
    ((tag, body),) = node.items()
    if tag == "size":
        return type(body) is list and all(
            type(n) is int and -(1 << 63) <= n < 1 << 63 for n in body
        )
    pattern = _DTYPE if tag == "dtype" else _DEVICE
    return type(body) is str and pattern.fullmatch(body) is not None


def decode(node: Any, key: str) -> Any:
    """Return the value of a valid node; ``LimpetError`` if torch is missing or does not know it."""
    ((tag, body),) = node.items()
    torch = lazy_torch.import_torch(f"The value {key!r} is a torch {tag}")
    if tag == "size":
        return torch.Size(body)
    try:
        # vars(), because a lookup of an attribute may import a module of torch
        value = vars(torch).get(body) if tag == "dtype" else torch.device(body)
    except RuntimeError:
        value = None
    if type(value) is not getattr(torch, tag):
        raise LimpetError(
            f"The value {key!r} is the {tag} {body}, which torch {torch.__version__} does not know",
            todo="Install a newer version of torch, or exclude the value with keys=",
            leaf=key,
        )
    return value


def describe(node: Any) -> str:
    """Return a valid node as text, without torch."""
    ((tag, body),) = node.items()
    text = {"dtype": f"torch.{body}", "device": f"torch.device({body!r})"}
    return text.get(tag, f"torch.Size({body})")
