"""Runs what needs no PyTorch in clean environments of several versions of Python.

``make test-python`` calls it. A version that is not on this machine is skipped with a message.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TESTED_COMPLETELY = "3.11"
"""The version of `make test`: here, only that Limpet works without torch."""

TOOLS = ("pytest", "pytest-xdist", "hypothesis")
_NAMES = {
    "": "arguments decoders events name text",
    "attacks": "oversized_records",
    "cli": "completion ls pin remote_mistakes request_save resolve restart_records rm start verify",
    "convert": "copy",
    "evaluation": "functions schedule worker",
    "layout": "devices global_plan read_plan select shard_layout",
    "notices": "bounded_source call_notice file_notice final_code platform slurm",
    "run": "address best copy_and_deletion policy run save_request writer",
    "saving": "fork parts save unreliable_stores",
    "snapshot": "location",
    "storage": "crash faults links local tmpfs uploads",
    "tasks": "queue remote state",
    "testing": "crashfs faultfs",
    "tiers": "hosts ladder_ranks memory_check peer_addresses placement recovery_store",
    "training": "bad_sources preemption_guard preemption_policy run_end score_history takeover",
}
MODULES = [
    Path("tests", folder, f"test_{name}.py")
    for folder, names in _NAMES.items()
    for name in names.split()
]
"""Fast modules that import neither torch nor another optional package, not even through other
modules, by folder."""


def find_python(version):
    """Return the command of a Python of this version that runs; a shim of pyenv may not."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = shutil.which(f"python{version}")
    code = f"import sys, venv; sys.exit({version!r} != '%d.%d' % sys.version_info[:2])"
    for command in (found, *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))):
        check = [command or "", "-c", code]
        if command and not subprocess.run(check, capture_output=True, check=False).returncode:
            return command
    return None


def make_environment(version, command):
    """Return the command of the environment of a version, which is created unless it exists."""
    folder = ROOT / ".pythons" / version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = " ".join((*project["dependencies"], *TOOLS))
    ready, python = folder / "packages", str(folder / "bin" / "python")
    if not ready.exists() or ready.read_text() != packages:
        subprocess.run([command, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
        subprocess.run([*install, *packages.split(" ")], cwd=ROOT, check=True)
        ready.write_text(packages)
    return python


def run(python, *arguments):
    """Run Python on the source tree. Return True if it succeeds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([python, *arguments], cwd=ROOT, env=environment, check=False)
    return done.returncode == 0


def main():
    failed = []
    for version in VERSIONS:
        command = find_python(version)
        if command is None:
            print(f"Python {version}: skipped, because it is not on this machine", flush=True)
            continue
        python = make_environment(version, command)
        print(f"Python {version}: ", end="", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            passed = run(python, "-W", "error", "-m", "tests.without_torch", folder)
        if version != TESTED_COMPLETELY:
            options = "-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not slow and not root"
            passed = run(python, "-m", "pytest", *options, *MODULES) and passed
        failed += [] if passed else [version]
    if failed:
        print(f"FAILED with Python {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
