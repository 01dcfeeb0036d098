"""Fixtures of the tests of restarts: a host with a memory tier."""

from __future__ import annotations

from tests.tiers.conftest import host  # noqa: F401
