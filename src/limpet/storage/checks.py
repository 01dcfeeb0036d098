"""Checks and errors that all stores share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

import numpy as np

from limpet.errors import AlreadyExists, Denied, StoreError
from limpet.text import to_repr

T = TypeVar("T")


Rule = tuple[str, type | tuple[type, ...], Callable[[Any], bool], str]
"""The name of an option, its types, whether a value is valid, and what is, for the message."""

TIMEOUT: Rule = (
    "timeout",
    (int, float),
    lambda n: 0 < n < math.inf,
    "a number of seconds greater than 0",
)
_SECRET_OPTIONS = {
    *("endpoint", "secret_access_key", "session_token", "access_key_id"),  # an endpoint may have
    *("account_key", "sas_token", "service_account", "config"),  # a password
}
CONCURRENCY: Rule = ("concurrency", int, lambda n: 1 <= n <= 1024, "1 to 1024")
OPTIONAL_TEXT = (str, type(None))
"""The types of an option that is a text or None."""
WEB_URL = "http://HOST or https://HOST, without a password"


def is_web_url(url: str | None) -> bool:
    """Return True for the URL of a server without a user name or password, and for None."""
    return url is None or (url.startswith(("http://", "https://")) and "@" not in url)


SPREAD: Rule = ("spread", int, lambda n: n == 0 or 2 <= n <= 256, "2 to 256, or 0")
ENDPOINT: Rule = ("endpoint", OPTIONAL_TEXT, is_web_url, WEB_URL)


def switch(name: str) -> Rule:
    """Return the rule of an option that is True or False."""
    return name, bool, lambda value: True, "True or False"


def make_options(
    options_class: Callable[..., T], kind: str, options: Mapping[str, Any], rules: Iterable[Rule]
) -> T:
    """Return the options of a store on a server as an object of a dataclass.

    ``kind``: "an S3 store", for the message. Raises ``StoreError`` for an unknown name and for a
    value that ``rules`` do not allow, which come before those of all stores.
    """
    known = [field.name for field in fields(cast(Any, options_class))]
    for name in options:
        if name not in known:
            raise StoreError(f"Unknown option {name!r} of {kind}", expected=" or ".join(known))
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
    result = options_class(**plain)
    by_name = {rule[0]: rule for rule in (CONCURRENCY, TIMEOUT, *rules)}
    for name, rule in by_name.items():
        check_option(rule, getattr(result, name))
    return result


def check_option(rule: Rule, value: Any) -> None:
    """Raise ``StoreError`` unless a value of an option is valid. True is not a number."""
    name, types, is_valid, expected = rule
    is_bool = isinstance(value, bool) and types is not bool
    if is_bool or not isinstance(value, types) or not is_valid(value):
        found = to_repr(value)
        if name in _SECRET_OPTIONS:
            found = f"another value of type {type(value).__name__}"
        raise StoreError(f"Invalid value for {name}=", expected=expected, found=found)


def check_range(key: str, store: str, offset: int, length: int, capacity: int) -> None:
    """Raise ``StoreError`` if a range is negative or does not fit into ``capacity`` bytes."""
    if offset < 0 or length < 0 or length > capacity:
        raise StoreError(
            f"Invalid range for reading {key} in {store}",
            expected=f"an offset of 0 or more, and at most the {capacity} bytes of the buffer",
            found=f"{length} bytes from offset {offset}",
            key=key,
            store=store,
            offset=offset,
        )


def short_read_error(key: str, store: str, offset: int, length: int, found: int) -> StoreError:
    return StoreError(
        f"{key} in {store} is too short for a read from byte {offset}",
        expected=f"{length} bytes",
        found=f"{found} bytes",
        todo="The object was truncated or replaced: load another version",
        key=key,
        store=store,
        offset=offset,
    )


def replaced_error(key: str, store: str) -> StoreError:
    return StoreError(
        f"{key} in {store} was replaced while it was read",
        expected="an object that does not change",
        todo="Find the program that writes there; load another version",
        key=key,
        store=store,
    )


def too_long_error(key: str, store: str, limit: int, found: int) -> StoreError:
    return StoreError(
        f"{key} in {store} is too long",
        expected=f"at most {limit} bytes",
        found=f"{found} bytes",
        key=key,
        store=store,
    )


MAX_PUTS = 100
"""The largest number of tries to create an object that other processes create and delete."""


def contended_error(key: str, store: str) -> StoreError:
    """Return the error for an object that was there again each time it had been removed."""
    return StoreError(
        f"Cannot create {key} in {store}: it exists again each time that it was removed",
        expected=f"to create it in {MAX_PUTS} tries",
        todo=f"Find the program that creates {key} again and again, and end it",
        key=key,
        store=store,
    )


def is_partial(name: str) -> bool:
    """Return True if a file or an object with this name is an unfinished upload."""
    return name.startswith(".") and name.endswith(".partial")


def refuse_partial(key: str, store: str) -> None:
    """Raise ``StoreError`` if an object with this key would look like an unfinished upload."""
    if is_partial(key.rpartition("/")[2]):
        raise StoreError(
            f"Cannot write {key} to {store}: the name is reserved for unfinished uploads",
            key=key,
            store=store,
        )


def weak_store_error(key: str, store: str, promise: str, found: str) -> Denied:
    """Return the error for a write to a store that cannot keep ``promise``: it does ``found``.

    It is ``Denied``, as for a read-only folder: nothing was written, and reading goes on.
    """
    return Denied(
        f"{store} cannot keep a promise of Limpet; nothing was written to it",
        expected=promise,
        found=found,
        todo="Use another store, or accept this: limpet.open_store(URL, allow_weak=True)",
        key=key,
        store=store,
    )


def exists_error(key: str, store: str) -> AlreadyExists:
    return AlreadyExists(f"{key} is already in {store}; nothing was changed", key=key, store=store)


def check_written_length(key: str, store: str, expected: int, found: int) -> None:
    """Raise ``StoreError`` if an object has another length than what was written."""
    if found != expected:
        raise StoreError(
            f"The length of {key} in {store} differs from the bytes written",
            expected=f"{expected} bytes",
            found=f"{found} bytes",
            key=key,
            store=store,
        )
