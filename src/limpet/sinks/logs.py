"""Events for the ``logging`` module."""

from __future__ import annotations

import logging
from typing import Any

from limpet.sinks.wording import describe_event

_LEVELS = {
    "saved": logging.INFO,
    "save_waited": logging.INFO,
    "began": logging.INFO,
    "loaded": logging.INFO,
    "resumed": logging.INFO,
    "resume_checked": logging.INFO,
    "resume_differs": logging.WARNING,
    "options_replaced": logging.WARNING,
    "stopped": logging.INFO,
    "finished": logging.INFO,
    "taken_over": logging.INFO,
    "deleted": logging.INFO,
    "structure_changed": logging.INFO,
    "platform_detected": logging.INFO,
    "notice": logging.WARNING,
    "notice_source_failed": logging.WARNING,
    "preempted": logging.WARNING,
    "skipped": logging.WARNING,
    "save_skipped": logging.WARNING,
    "left_unsaved": logging.WARNING,
    "pin_left": logging.WARNING,
    "read_again": logging.WARNING,
    "waiting": logging.WARNING,
    "fewer_copies": logging.WARNING,
    "evaluation_idle": logging.WARNING,
    "members_unsaved": logging.WARNING,
    "request_unseen": logging.WARNING,
    "read_alone": logging.WARNING,
    "not_agreed": logging.WARNING,
    "savepoint_failed": logging.WARNING,
    "ranks_awaited": logging.WARNING,
    "save_failed": logging.ERROR,
}


class Logging:
    """Logs each event that is of interest to people, to the logger with the given name.

    The level is INFO for normal events, WARNING if attention is needed, and ERROR for a failed
    save. A record has the name and fields of the event as ``record.event`` and ``record.fields``.
    """

    def __init__(self, logger: str = "limpet") -> None:
        self._logger = logging.getLogger(logger)

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        level = _LEVELS.get(name)
        if level is None or not self._logger.isEnabledFor(level):
            return
        text = describe_event(name, fields)
        if text is not None:
            self._logger.log(level, "%s", text, extra={"event": name, "fields": fields})
