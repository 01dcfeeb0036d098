"""The options of the stores on servers: their defaults, and what each may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np

from limpet.errors import StoreError
from limpet.text import to_repr
from limpet.types import MIB

MIN_PART = 5 * MIB
"""The least length of a part other than the last one (the limit of S3 and of Google)."""

WEB_URL = "http://HOST or https://HOST, without a password"

_TIMEOUTS = (1, 4, 15, 60)
LONGEST_TIMEOUT = 60


def fit_timeout(seconds: float) -> int:
    """Return the longest timeout of a client that ends within ``seconds``, or 1 s."""
    return max(t for t in _TIMEOUTS if t <= max(_TIMEOUTS[0], seconds))


def is_web_url(url: str | None) -> bool:
    """Return True for the URL of a server without a user name or password, and for None."""
    return url is None or (url.startswith(("http://", "https://")) and "@" not in url)


def option(
    default: Any,
    types: type | tuple[type, ...],
    expected: str,
    is_valid: Callable[[Any], bool] = lambda value: True,
    *,
    is_secret: bool = False,
) -> Any:
    """Return the field of an option. ``expected``: what is valid, for the message; ``is_secret``:
    nothing shows the value. True is not a number."""
    rule = {"types": types, "expected": expected, "is_valid": is_valid, "is_secret": is_secret}
    return field(default=default, repr=not is_secret, metadata=rule)


def part_option(default: int) -> Any:
    """Return the field of the length of a part."""
    return option(default, int, f"at least {MIN_PART} bytes", lambda n: n >= MIN_PART)


def switch() -> Any:
    """Return the field of an option that is True or False."""
    return option(False, bool, "True or False")


def text(
    expected: str = "text",
    is_valid: Callable[[str], bool] = lambda value: True,
    *,
    is_secret: bool = False,
) -> Any:
    """Return the field of an option that is a text or None."""
    return option(
        None,
        (str, type(None)),
        expected,
        lambda value: value is None or is_valid(value),
        is_secret=is_secret,
    )


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a store. ``kind``: "an S3 store", for messages.

    ``timeout``: seconds for which a call is repeated while the server is unreachable or busy.
    """

    timeout: float = option(
        300.0, (int, float), "a number of seconds greater than 0", lambda n: 0 < n < math.inf
    )
    kind: ClassVar[str] = "a store"

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Return the options. Raises ``StoreError`` for an unknown name or an invalid value."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise StoreError(
                    f"Unknown option {name!r} of {cls.kind}", expected=" or ".join(known)
                )
        made = cls(**{k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()})
        for f in fields(cls):
            value, rule = getattr(made, f.name), f.metadata
            is_bool = isinstance(value, bool) and rule["types"] is not bool
            if is_bool or not isinstance(value, rule["types"]) or not rule["is_valid"](value):
                found = to_repr(value)
                if rule["is_secret"]:
                    found = f"another value of type {type(value).__name__}"
                expected = rule["expected"]
                raise StoreError(f"Invalid value for {f.name}=", expected=expected, found=found)
        made.check_combination()
        return made

    def check_combination(self) -> None:
        """Raise ``StoreError`` for options that do not go together."""


@dataclass(frozen=True, slots=True)
class BucketOptions(Options):
    """The options of all object stores. See also ``Options``.

    ``endpoint``: the URL of another server. ``anonymous``: send no credentials. ``part_size``: the
    length of the parts in which a large object is sent, in bytes. ``concurrency``: the largest
    number of requests of this process in progress. ``spread``: save the shards of a version in so
    many folders, 2 to 256; 0: in its own folder.
    """

    endpoint: str | None = text(WEB_URL, is_web_url, is_secret=True)  # it may have a password
    anonymous: bool = switch()
    part_size: int = part_option(16 * MIB)
    concurrency: int = option(32, int, "1 to 1024", lambda n: 1 <= n <= 1024)
    spread: int = option(0, int, "2 to 256, or 0", lambda n: n == 0 or 2 <= n <= 256)
