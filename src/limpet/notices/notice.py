"""A notice that this process will be stopped, and the protocol of what reports it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from limpet.errors import LimpetError
from limpet.text import to_repr


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that this process will be stopped.

    ``source`` says what sent it, for messages: ``"SIGTERM"``, ``"the AWS spot instance action"``.
    ``seconds`` is the time from now until the stop, or None if the source does not know it.
    ``stops`` is False if the machine is only at risk: the training saves, and goes on.
    ``age`` is the number of seconds since the notice came, which count if ``seconds`` is None.
    """

    source: str
    seconds: float | None = None
    stops: bool = True
    age: float = field(default=0.0, compare=False)


class NoticeSource(Protocol):
    """Reports notices. A thread of its own calls it, which is not the thread of the training.

    ``name`` says what it is, for messages. ``interval`` is the number of seconds between two polls.
    """

    name: str
    interval: float

    def poll(self) -> Notice | None:
        """Return a notice, or None. MUST return or raise within 5 seconds.

        A notice with ``stops`` may be returned at each poll: only an earlier deadline has an
        effect. A notice without ``stops`` MUST be returned once. Raises ``OSError`` if the source
        does not answer; it is then polled again, and an event reports the outage once. Any other
        error ends the source, and the end of the training raises it.
        """
        ...


def check_notice(found: object) -> Notice | None:
    """Return what a source has returned. Raises ``LimpetError`` unless it is a notice or None."""
    if found is None or (isinstance(found, Notice) and _is_valid(found)):
        return found
    raise LimpetError(
        "A source of notices returned something else than a notice",
        expected="None, or a Notice(source: str, seconds: float | None, stops: bool)",
        found=to_repr(found)[:200],
    )


def _is_valid(notice: Notice) -> bool:
    return (
        isinstance(notice.source, str)
        and isinstance(notice.stops, bool)
        and (notice.seconds is None or _is_number(notice.seconds))
        and _is_number(notice.age)
    )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value)
