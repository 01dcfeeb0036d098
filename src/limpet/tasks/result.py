"""Results of tasks as JSON text: nothing that a worker sends can run code, or change on its way."""

from __future__ import annotations

import json
from typing import Any

from limpet.errors import TaskError

_MAX_DEPTH = 64


def encode_result(result: Any) -> str:
    """Return a result as JSON, with NaN and infinities. Raises ``TaskError`` if it is not plain."""
    _check(result, "the result", 0)
    try:
        return json.dumps(result)
    except ValueError as e:
        raise TaskError("A task cannot return an int of so many digits", found=str(e)) from e


def decode_result(text: str) -> Any:
    """Return the result with this text. Raises ``TaskError`` if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as e:
        raise TaskError("The result of a task is not JSON", found=repr(text)[:200]) from e


def _check(value: Any, where: str, depth: int) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list and depth < _MAX_DEPTH:
        for item in value:
            _check(item, f"an element of {where}" if depth == 0 else where, depth + 1)
    elif type(value) is dict and depth < _MAX_DEPTH:
        for key, item in value.items():
            if type(key) is not str:
                raise _not_plain(f"a key of {where}", key)
            _check(item, f"{key!r} in {where}" if depth == 0 else where, depth + 1)
    else:
        raise _not_plain(where, value)


def _not_plain(where: str, value: object) -> TaskError:
    return TaskError(
        f"A task cannot return {where}",
        expected="None, bools, numbers, texts, and lists and dicts (with texts as keys) of these",
        found=f"{type(value).__name__}: {repr(value)[:100]}",
        todo="Convert it: tensors with .tolist() or .item(), tuples with list()",
    )
