"""Saves and loads on real processes over gloo: FSDP2, HSDP, tensor parallel, DDP, and stages."""

from __future__ import annotations

from functools import partial

import pytest

from tests.ranks.scenarios import SCENARIOS
from tests.ranks.world import run_each, run_scenarios

pytestmark = pytest.mark.slow


def test_all_scenarios_pass(tmp_path):
    """All scenarios are one test, so that each worker of pytest-xdist does not start processes."""
    results = run_scenarios(partial(run_each, SCENARIOS), tmp_path)
    failed = [
        f"{name} on rank {rank}: {outcomes[name]}"
        for name in [scenario.__name__ for scenario in SCENARIOS]
        for rank, outcomes in enumerate(results)
        if outcomes[name] != "passed"
    ]
    assert not failed, "\n".join(failed)
