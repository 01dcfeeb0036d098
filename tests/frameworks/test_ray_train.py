"""Ray Train: its tests run in a process of their own, on one small cluster."""

import importlib.util

import pytest

from tests.ray_cluster import run_cases


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_cases_pass_in_a_process_of_their_own():
    run_cases("tests/frameworks/ray_train_cases.py")
