"""A plugin of pytest: one cluster of Ray for all files ``ray_cases.py``, in one process."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import run_process


def run_cases(*files):
    """Run tests in a process of their own: Ray leaves threads and a signal handler behind, and each
    worker of pytest would start its own cluster."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = run_process(
        [*command, "-p", "tests.ray_cluster", *files],
        900,
        cwd=Path(__file__).parents[1],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def cluster():
    """A cluster of two CPUs. Returns a folder of its processes, ``TEST_FOLDER``."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as base:
        os.environ |= {"RAY_AUTH_MODE": "disabled", "TEST_FOLDER": base}
        import ray

        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 << 20,
            _temp_dir=f"{base}/ray",
        )
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        yield Path(base)
        ray.shutdown()
