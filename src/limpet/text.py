"""The text of messages, and warnings at the user's own line."""

from __future__ import annotations

import re
import reprlib
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

MAX_SHOWN = 20
"""The number of leaves that a message lists."""

VERIFY_ADVICE = "Load another version; `limpet verify` lists the intact ones"
PIN_ADVICE = "Load another version; `limpet pin RUN STEP` protects a version"


def with_article(noun: str) -> str:
    """Return the noun with its indefinite article: ``a dict``, ``an int``."""
    return f"{'an' if noun[:1] in tuple('aeioAEIO') else 'a'} {noun}"


class LongRepr(reprlib.Repr):
    """``reprlib.Repr`` with integers of any length.

    Python refuses to convert integers of more than 4,300 digits to decimal text. They are shown in
    hexadecimal.
    """

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:
            text = hex(x)
            return text if len(text) <= self.maxlong else f"{text[: self.maxlong - 3]}..."

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


# A user with a port after it, as in ``hdfs://host:8020/run@120``, is a host. A user may be an
# e-mail address, and a password may contain "@". Only a password may contain a slash.
_USER = re.compile(r"(://)(?:(?![^\s/]*:\d+/)[^\s/:]*:[^\s@]*(?:@[^\s@/]*)*@|[^\s/]*@)")
_QUERY = re.compile(r"\?[^\s?=\"'<>]*=[^\s\"'<>)]*")


def hide_secrets(text: str) -> str:
    """Return a text in which the user names, passwords, and queries of URLs are ``...``.

    The text may be a URL that was refused, or the message of a library.
    """
    return _QUERY.sub("?...", _USER.sub(r"\1...@", text))


def format_list(
    items: Sequence[object], limit: int, separator: str = ", ", total: int | None = None
) -> str:
    """Return at most ``limit`` items as text: ``a, b`` or ``a, b, and 4 more``.

    ``total`` is the total number of items if ``items`` contains only the first of them.
    """
    shown = [str(item) for item in items[:limit]]
    more = (len(items) if total is None else total) - len(shown)
    return separator.join([*shown, f"and {more} more"] if more else shown)


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a count and its noun: ``1 version``, ``2 versions``; ``1 leaf``, ``2 leaves``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text: ``rank 3``, ``ranks 0, 1, 2``. At most 8 ranks are listed."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_list(ranks, 8)}"


def to_printable(text: object) -> str:
    """Return text from outside as one line without terminal control characters."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def format_size(nbytes: int) -> str:
    """Format a number of bytes for people, such as ``4.2 MiB``."""
    number, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if number < 999.95:
            break
        number, unit = number / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{number:.1f} {unit}"


def user_frame() -> FrameType:
    """Return the user's frame that called into Limpet, directly or through PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return frame


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("limpet.", "torch."))


def user_line() -> tuple[str, int]:
    """Return the file and the number of the user's line that called into Limpet."""
    return _line_of(user_frame())


def _line_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the user's line that called into Limpet, at any depth of internal calls."""
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})  # as warnings.warn
    module = frame.f_globals.get("__name__", "<string>")
    warnings.warn_explicit(message, category, *_line_of(frame), module, registry)
