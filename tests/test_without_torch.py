"""A state of NumPy arrays only is saved, resumed, and inspected where torch cannot be imported."""

import subprocess
import sys
from pathlib import Path

from tests import pythons

ROOT = Path(__file__).parents[1]


def test_a_training_of_numpy_arrays_needs_no_torch(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tests.without_torch", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "passed without torch\n"), done.stderr


def test_the_tests_of_other_versions_of_python_import_no_torch():
    modules = [".".join(module.with_suffix("").parts) for module in pythons.MODULES]
    code = (
        "import importlib, sys; sys.modules['torch'] = None\n"
        f"for name in {modules}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
