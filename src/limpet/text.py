"""Values as text, for messages, events, and commands; and warnings at the user's own line."""

from __future__ import annotations

import os
import re
import reprlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from math import isfinite, prod
from types import FrameType
from typing import Any

MAX_SHOWN = 20
"""The number of leaves that a message lists."""

_MAX_NAME = 24
_MAX_TEXT = 200
_MAX_DEPTH = 8

VERIFY_ADVICE = "Load another version; `limpet verify` lists the intact ones"
PIN_ADVICE = "Load another version; `limpet pin RUN STEP` protects a version"


def advise_install(extra: str) -> str:
    """Return the advice to install what an extra of this package brings, such as "torch"."""
    return f'Install it: pip install "limpet[{extra}]"'


def with_article(noun: str) -> str:
    """Return the noun with its indefinite article: ``a dict``, ``an int``."""
    return f"{'an' if noun[:1] in tuple('aeioAEIO') else 'a'} {noun}"


def describe_newest(step: object) -> str:
    """Return a clause with the step of the newest version, or None if there is none."""
    return "nothing is saved" if step is None else f"the newest version is of step {step}"


class LongRepr(reprlib.Repr):
    """``reprlib.Repr`` with integers of over 4,300 digits, which Python refuses, in hexadecimal."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:
            return truncate(hex(x), self.maxlong)

    def repr_instance(self, x: object, level: int) -> str:
        try:
            return repr(x)
        except ValueError:
            return f"<{type(x).__qualname__}>"


_long_repr = LongRepr()


def to_repr(value: object) -> str:
    """Return the ``repr`` of a value, shortened if it contains an integer of over 4,300 digits."""
    try:
        return repr(value)
    except ValueError:
        return _long_repr.repr(value)


def without_surrogates(text: str) -> str:
    """Return a text that can be encoded: names of files that are no UTF-8 have surrogates."""
    return text.encode(errors="backslashreplace").decode()


def is_text(value: object) -> bool:
    """Return True for a str that can be encoded."""
    return isinstance(value, str) and value == without_surrogates(value)


# A user with a port after it, as in ``hdfs://host:8020/run@120``, is a host. A user may be an
# e-mail address, and a password may contain "@". Only a password may contain a slash. In
# ``s3://bucket@latest``, there is no user.
_ADDRESS = r"(?:latest|best\b[^\s@]*|\d+(?:\.\d+)?)(?![^\s'\",;:.)]|\.\S)"
_USER = re.compile(
    rf"(://)(?:(?![^\s/]*:\d+/)[^\s/:]*:[^\s@]*(?:@[^\s@/]*)*@|[^\s/]*@(?!{_ADDRESS}))"
)
_TOKEN = re.compile(r"(tcp://[^\s/]+/)[^\s'\"<>,;)]+")  # of a task queue
_QUERY = re.compile(r"\?[^\s?=\"'<>]*=[^\s\"'<>)]*")


def hide_secrets(text: str) -> str:
    """Return a text in which the user names, passwords, and queries of URLs are ``...``."""
    return _TOKEN.sub(r"\1...", _QUERY.sub("?...", _USER.sub(r"\1...@", text)))


def hide_in_urls(text: str) -> str:
    """Do the same if there is a URL at all: a local path may contain ``?lr=0.1``."""
    return hide_secrets(text) if "://" in text else text


def for_people(text: str) -> str:
    """Return a text without the secrets of URLs, and without the current folder before paths in it.
    All errors and warnings, and what commands and sinks print, pass through this."""
    text = hide_in_urls(text)
    with suppress(OSError):  # there may be no current folder
        if (folder := os.getcwd()) != "/" and folder in text:
            return re.sub(rf"(?<![^\s'\"(=,:]){re.escape(folder)}/(?=[^\s/])", "", text)
    return text


def format_list(
    items: Sequence[object], limit: int, separator: str = ", ", total: int | None = None
) -> str:
    """Return at most ``limit`` items: ``a, b, and 4 more``. ``total``: of all, if they are more."""
    shown = [str(item) for item in items[:limit]]
    more = (len(items) if total is None else total) - len(shown)
    return separator.join([*shown, f"and {more:,} more"] if more else shown)


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a count and its noun: ``1 version``, ``2 versions``; ``1 leaf``, ``2 leaves``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text: ``rank 3``, ``ranks 0, 1, 2``. At most 8 ranks are listed."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_list(ranks, 8)}"


def to_printable(text: object) -> str:
    """Return text from outside as one line without terminal control characters."""
    text = for_people(str(text))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def format_size(nbytes: float) -> str:
    """Format bytes with three digits, such as ``1.31 GiB``. Up to PiB, at most 8 characters."""
    if nbytes < 999.5:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 999.5:
            return f"{_three_digits(nbytes)} {unit}"
    return f"{_three_digits(nbytes / 1024)} PiB"


def format_duration(seconds: float) -> str:
    """Format seconds with three digits in a suitable unit, such as ``12.3 ms``."""
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    for limit, unit, length in ((0.9995, "ms", 1e-3), (119.5, "s", 1), (119.5 * 60, "min", 60)):
        if seconds < limit:
            return f"{_three_digits(seconds / length)} {unit}"
    return f"{_three_digits(seconds / 3600)} h"


def format_age(created: str) -> str:
    """Format the age of an ISO 8601 timestamp, such as ``3 min``; a future time has age 0."""
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds())
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def format_metrics(metrics: object, limit: int | None = None) -> str:
    """Format metrics on one line: ``loss 0.25, accuracy 0.9``; only ``limit`` of them, in short."""
    if not isinstance(metrics, Mapping):
        return ""
    width = None if limit is None else _MAX_NAME
    shown = [
        f"{truncate(str(name), width)} {format_value(value, width)}"
        for name, value in islice(metrics.items(), limit)
    ]
    more = len(metrics) - len(shown)
    return to_printable(", ".join(shown) + (f", {more} more" if more else ""))


def format_value(value: object, width: int | None = None) -> str:
    """Format a number or another value, in at most ``width`` characters."""
    plain = to_json_value(value)
    return f"{plain:.4g}" if isinstance(plain, float) else truncate(str(plain), width)


def truncate(text: str, width: int | None) -> str:
    """Return a text cut to ``width`` characters, at a word's end in its second half. None: any."""
    if width is None or len(text) <= width:
        return text
    words = text[: width - 2].rpartition(" ")[0]
    return f"{words if len(words) > width // 2 else text[: width - 3]}..."


def to_json_value(value: Any, limit: int | None = _MAX_TEXT, depth: int = 0) -> Any:
    """Convert any value to one that JSON can represent; never raises. Others become text, as "nan",
    of at most ``limit`` characters, and deep values are cut, unless that is None."""
    try:
        return _to_plain(value, limit, depth)
    except Exception:  # noqa: BLE001  (one odd value must not lose the line)
        return f"<{type(value).__qualname__}>"


def _to_plain(value: Any, limit: int | None, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return hide_in_urls(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return float(value) if isfinite(value) else repr(float(value))
    if isinstance(value, BaseException):
        return hide_in_urls(f"{type(value).__name__}: {value}".removesuffix(": "))
    if limit is not None and depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {
            k if isinstance(k, str) else to_repr(k): to_json_value(v, limit, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(v, limit, depth + 1) for v in value]
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        if prod(shape) == 1:
            return to_json_value(value.item(), limit, depth + 1)
        return f"<{type(value).__qualname__} of shape {tuple(shape)}>"
    return truncate(to_repr(value), limit)


def user_frame() -> FrameType:
    """Return the user's frame that called into Limpet, directly or through PyTorch."""
    frame, library = sys._getframe(1), ("limpet.", "torch.")
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(library):
        frame = frame.f_back
    return frame


def user_line() -> tuple[str, int]:
    """Return the file and the number of the user's line that called into Limpet."""
    frame = user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the user's line that called into Limpet, at any depth of internal calls."""
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})  # as warnings.warn
    module = frame.f_globals.get("__name__", "<string>")
    warnings.warn_explicit(
        for_people(message), category, frame.f_code.co_filename, frame.f_lineno, module, registry
    )
