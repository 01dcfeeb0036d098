"""Saves and loads on real processes over gloo: FSDP2, HSDP, tensor parallel, DDP, and stages."""

import pytest

from tests.ranks.scenarios import SCENARIOS
from tests.ranks.world import run_scenarios

pytestmark = pytest.mark.slow


def test_all_scenarios_pass(tmp_path):
    """All scenarios are one test, so that each worker of pytest-xdist does not start processes."""
    run_scenarios(SCENARIOS, tmp_path)
