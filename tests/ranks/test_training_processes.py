"""Whole trainings on real processes over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.whole_runs import SCENARIOS
from tests.ranks.world import run_scenarios

pytestmark = pytest.mark.slow


def test_trainings(tmp_path: Path) -> None:
    """One test, so that workers of pytest-xdist do not each start the processes."""
    told = run_scenarios("whole_runs", tmp_path)
    failed = [
        f"{course.__name__} on rank {rank}: {one[course.__name__]}"
        for course in SCENARIOS
        for rank, one in enumerate(told)
        if one[course.__name__] != "passed"
    ]
    assert not failed, "\n".join(failed)
    costs = [json.loads((tmp_path / f"cost{rank}.json").read_text()) for rank in range(2)]
    print(f"a step with nothing due: median {costs[0]:.0f} ns, {costs[1]:.0f} ns")
