"""What a notice says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from limpet.notices.notice import Notice


def test_a_notice_announces_a_stop_at_an_unknown_time_unless_it_says_more() -> None:
    notice = Notice("SIGTERM")
    assert notice.stops
    assert notice.seconds is None
    with pytest.raises(FrozenInstanceError):
        notice.seconds = 3.0
