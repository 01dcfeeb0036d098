"""The same on real processes: FSDP2, HSDP, tensor parallel, DDP, stages, over gloo."""

from __future__ import annotations

import pytest

from tests.ranks.scenarios import SCENARIOS
from tests.ranks.world import run_scenarios

pytestmark = pytest.mark.slow


def test_on_real_processes(tmp_path):
    """One test, so that workers of pytest-xdist do not each start the processes."""
    told = run_scenarios("scenarios", tmp_path)
    failed = [
        f"{name} on rank {rank}: {one[name]}"
        for name in [scenario.__name__ for scenario in SCENARIOS]
        for rank, one in enumerate(told)
        if one[name] != "passed"
    ]
    assert not failed, "\n".join(failed)
