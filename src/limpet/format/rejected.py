"""Errors for values that cannot be saved. One error lists all such values of a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from limpet.errors import Unsupported
from limpet.format.advice import advise
from limpet.text import MAX_SHOWN, format_list, with_article

NOT_PLAIN = "it is not a tensor, an array, or a plain value"

_MAX_KINDS = 50
"""The maximum number of kinds of values that a message lists."""

_MAX_KEY = 300
"""The maximum number of characters of a key that a message shows."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A value that cannot be saved.

    ``kind``: the name of its class; ``member``: the object whose ``state_dict()`` returned it, as
    text, if any.
    """

    key: str
    kind: str
    why: str
    advice: str
    member: str = ""


def unsupported(value: Any, key: str, why: str, advice: str = "") -> Unsupported:
    """Return the error for a value that cannot be saved; it names the key and the type.

    ``advice``: how to convert the value, if that depends on more than its class.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = advice or advise(value)
    return Unsupported(
        f"{key[:_MAX_KEY] or 'The state'!r} is {with_article(kind)} that cannot be saved"
        f" faithfully: {why}",
        todo=advice,
        leaf=key,
        leaves=(key,),
        rejections=[Rejection(key, kind, why, advice)],
    )


def nested_too_deeply(value: Any, key: str, why: str) -> Unsupported:
    """Return the error for a value that is nested too deeply. It ends the search for more values,
    because a value that contains itself twice has no end of paths."""
    error = unsupported(value, key, why, "Remove the reference to itself, or use fewer levels")
    error.fields["ends_search"] = True
    return error


def add_container(error: Unsupported, value: Any, key: str) -> None:
    """Note a container that has the value of an error that ends the search, from the inside out."""
    error.fields.setdefault("containers", []).append((value, key))


def _name_cycle(error: Unsupported) -> Unsupported:
    """Return the error for the outermost value that contains itself, or the same error if none
    does. Only now are the containers known, since the search has left them."""
    found: Unsupported | None = None
    keys: dict[int, str] = {}  # of the containers inside, by identity
    for value, key in error.fields.pop("containers", ()):
        if (inner := keys.get(id(value))) is not None:
            why = f"it contains itself, as {inner[:_MAX_KEY]!r}"
            found = unsupported(value, key, why, "Remove the reference to itself")
        keys[id(value)] = key
    return error if found is None else found


def collect(errors: Sequence[Unsupported]) -> Unsupported:
    """Return the first error, which then has the rejections of all."""
    first, *others = errors
    rejections = rejections_of(first)
    for other in others:
        rejections += rejections_of(other)
    first.fields["rejections"] = rejections
    return first


def rejections_of(error: Unsupported) -> list[Rejection]:
    """Return the values that an error is about."""
    found: list[Rejection] | None = error.fields.get("rejections")
    if found is not None:
        return found
    return [Rejection(error.fields.get("leaf", ""), "", error.what, error.todo or "")]


def ends_search(error: Unsupported) -> bool:
    """Return True if no more values are looked for after this error."""
    return "ends_search" in error.fields


def rejections_within(error: Unsupported, member: str) -> list[Rejection]:
    """Return the values that an error is about, as values in the ``state_dict()`` of ``member``."""
    return [replace(r, member=r.member or member) for r in rejections_of(error)]


def list_all(error: Unsupported) -> Unsupported:
    """Return one error for all rejections of ``error``: itself, if there is only one and it is not
    about a value that contains itself."""
    if (cycle := _name_cycle(error)) is not error:
        return cycle
    rejections = rejections_of(error)
    if len(rejections) == 1:
        return error
    keys: dict[tuple[str, str, str, str], list[str]] = {}
    for r in rejections:
        keys.setdefault((r.member, r.kind, r.why, r.advice), []).append(r.key)
    return Unsupported(
        f"{len(rejections)} values of the state cannot be saved faithfully",
        found=format_list(
            [_describe(*kind, found) for kind, found in keys.items()], _MAX_KINDS, "; "
        ),
        todo="Convert each of them as it says, or give the object that has it state_dict() and"
        " load_state_dict(). The error's field leaves has all keys",
        leaf=rejections[0].key,
        leaves=tuple(r.key for r in rejections),
    )


def _describe(member: str, kind: str, why: str, advice: str, keys: list[str]) -> str:
    """Describe the rejections that differ only in their keys."""
    shown = [repr(key[:_MAX_KEY]) for key in keys[:MAX_SHOWN]]
    names = format_list(shown, MAX_SHOWN, total=len(keys))
    noun = with_article(kind) if len(keys) == 1 else f"each {with_article(kind)}"
    where = f" in the state_dict() of {member}" if member else ""
    if not kind:
        return f"{why} ({advice})"
    return f"{names}, {noun}{where} ({advice if why == NOT_PLAIN else f'{why}. {advice}'})"
