"""Notices by a function of the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from limpet.arguments import real, require
from limpet.errors import LimpetError
from limpet.notices.notice import BoundedSource, Notice, check_notice
from limpet.text import to_repr


class CallNotice(BoundedSource):
    """A notice when a function returns one.

    The function returns None or False for no notice, True for a notice, the number of seconds until
    the stop (0 and less mean now), or a ``Notice``, which MUST be returned once if it does not
    stop. One thread at a time calls it, not that of the training, and never while it hangs.

    ``name``: for messages, by default the name of the function. ``interval``: seconds between two
    polls. ``check`` raises ``OSError`` if the function raises, or returns anything else.
    """

    def __init__(
        self,
        function: Callable[[], Notice | bool | float | None],
        *,
        name: str | None = None,
        interval: float = 1.0,
    ) -> None:
        """Raises ``LimpetError`` for an invalid value."""
        require("function", callable(function), "a function without parameters", function)
        if name is None:
            name = f"the function {getattr(function, '__qualname__', type(function).__qualname__)}"
        super().__init__(name, interval)
        self._function = function

    def check(self) -> Notice | None:
        try:
            result = self._function()
        except BaseException as e:  # sys.exit() of the function would only end its thread
            raise OSError(f"{self.name} failed: {type(e).__name__}: {e}") from e
        if result is None or result is False:
            return None
        if result is True:
            return Notice(self.name)
        if isinstance(result, Notice):
            with suppress(LimpetError):
                return check_notice(result)
        elif (number := real(result)) is not None and math.isfinite(number):
            return Notice(self.name, max(0.0, number))
        raise OSError(
            f"{self.name} returned {to_repr(result)}. Expected None, a bool, a number of seconds, "
            "or a Notice"
        )
