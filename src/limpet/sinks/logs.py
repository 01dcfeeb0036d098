"""Events for the ``logging`` module."""

from __future__ import annotations

import logging
from typing import Any

from limpet.sinks.wording import STYLES, describe_event

_LEVELS = {"yellow": logging.WARNING, "bold red": logging.ERROR}
"""The levels of events by their style; that of the others is INFO."""


class Logging:
    """Logs each event that is of interest to people, to the logger with the given name.

    The level is INFO for normal events, WARNING if attention is needed, and ERROR for a failed
    save. A record has the name and fields of the event as ``record.event`` and ``record.fields``.
    """

    def __init__(self, logger: str = "limpet") -> None:
        self._logger = logging.getLogger(logger)

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        level = _LEVELS.get(STYLES.get(name, ""), logging.INFO)
        if name not in STYLES or not self._logger.isEnabledFor(level):
            return
        text = describe_event(name, fields)
        if text is not None:
            self._logger.log(level, "%s", text, extra={"event": name, "fields": fields})
