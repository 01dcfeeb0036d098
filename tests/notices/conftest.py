"""Fixtures of the tests of notices."""

import pytest

from tests.notices.manual_clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock()
