"""A short ``make chaos``: an elastic training of 4 ranks on 2 hosts under every kind of event."""

import os

import pytest
from rich.console import Console

from tests.chaos.__main__ import run_chaos
from tests.chaos.schedule import NEEDS_ROOT, Kind

pytestmark = pytest.mark.chaos

SEED = 3


def test_other_numbers_of_ranks_survive_every_kind_of_event(tmp_path):
    kinds = len(Kind) - len(NEEDS_ROOT) * (os.getuid() != 0)
    console = Console(highlight=False, width=170)
    failures = run_chaos(console, tmp_path / "chaos", SEED, changes_size=True, least_events=kinds)
    assert not failures, "\n\n".join(failures)


def test_four_ranks_end_with_equal_bits(tmp_path):
    console = Console(highlight=False, width=170)
    failures = run_chaos(console, tmp_path / "chaos", SEED, changes_size=False, least_events=3)
    assert not failures, "\n\n".join(failures)
