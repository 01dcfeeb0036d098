"""Events that a platform plans ahead, and which of them are notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from limpet.arguments import check_seconds
from limpet.notices.notice import Notice

BEFORE = 300.0
"""By default, a stop that is more than this many seconds away does not stop the training yet."""


@dataclass(frozen=True, slots=True)
class PlannedEvent:
    """Something that a platform will do to this machine. ``seconds``: until it may begin, 0.0 once
    it has begun, None if unknown. ``is_final``: the machine does not come back."""

    key: str
    source: str
    seconds: float | None
    stops: bool = True
    is_final: bool = False


class PlannedEvents:
    """The planned events of a platform, in successive answers. A stop that is more than ``before``
    seconds away is reported once, as a risk. So is an event that had begun when this process first
    asked: platforms list a reboot for minutes after it, which would stop each restart."""

    def __init__(self, before: float) -> None:
        self._before = check_seconds("before=", before)
        self._is_first = True
        self._reported: set[str] = set()
        self._begun: set[str] = set()

    def notice(self, events: Sequence[PlannedEvent]) -> Notice | None:
        """Return the notice of the earliest stop in one whole answer, otherwise of a new risk."""
        stops, risks = [], []
        for event in events:
            has_begun = event.seconds is None or event.seconds <= 0
            if self._is_first and has_begun and not event.is_final:
                self._begun.add(event.key)
            is_near = event.seconds is None or event.seconds <= self._before
            if event.stops and is_near and event.key not in self._begun:
                stops.append(Notice(event.source, event.seconds))
            elif event.key not in self._reported:
                risks.append(Notice(event.source, event.seconds, stops=False))
        self._is_first = False
        self._reported = {event.key for event in events}
        self._begun &= self._reported
        return min(stops, key=lambda n: n.seconds or 0.0, default=risks[0] if risks else None)


def most_urgent(checks: Iterable[Callable[[], Notice | None]]) -> Notice | None:
    """Return the first notice of a stop, otherwise one of a risk. A check's ``OSError`` is raised
    only if there is neither."""
    risk: Notice | None = None
    error: OSError | None = None
    for check in checks:
        try:
            notice = check()
        except OSError as e:
            error = error or e
            continue
        if notice is not None and notice.stops:
            return notice
        risk = risk or notice
    if risk is None and error is not None:
        raise error
    return risk
