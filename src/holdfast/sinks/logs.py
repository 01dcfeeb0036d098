"""Events for the standard library's logging."""

from __future__ import annotations

import logging
from typing import Any

from holdfast.sinks.wording import describe_event

_LEVELS = {
    "saved": logging.INFO,
    "save_waited": logging.INFO,
    "began": logging.INFO,
    "resumed": logging.INFO,
    "stopped": logging.INFO,
    "deleted": logging.INFO,
    "structure_changed": logging.INFO,
    "skipped": logging.WARNING,
    "save_skipped": logging.WARNING,
    "left_unsaved": logging.WARNING,
    "pin_left": logging.WARNING,
    "request_unseen": logging.WARNING,
    "read_alone": logging.WARNING,
    "not_agreed": logging.WARNING,
    "ranks_awaited": logging.WARNING,
    "save_failed": logging.ERROR,
}


class Logging:
    """A record for each event that a person may want to know of, in the logger of that name.

    What went as it should is INFO, what a person should look at is WARNING, a save that failed is
    ERROR. A record has the event's name and fields as ``record.event`` and ``record.fields``.
    """

    def __init__(self, logger: str = "holdfast") -> None:
        self._logger = logging.getLogger(logger)

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        level = _LEVELS.get(name)
        if level is not None and self._logger.isEnabledFor(level):
            more = {"event": name, "fields": fields}
            self._logger.log(level, "%s", describe_event(name, fields), extra=more)
