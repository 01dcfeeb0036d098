"""Whole trainings on real processes over gloo."""

import json

import pytest

from tests.ranks.whole_runs import SCENARIOS
from tests.ranks.world import run_scenarios

pytestmark = pytest.mark.slow


def test_all_scenarios_pass(tmp_path):
    """All scenarios are one test, so that each worker of pytest-xdist does not start processes."""
    run_scenarios(SCENARIOS, tmp_path)
    costs = [json.loads((tmp_path / f"cost{rank}.json").read_text()) for rank in range(2)]
    print(f"a step without a save: median {costs[0]:.0f} ns, {costs[1]:.0f} ns")
