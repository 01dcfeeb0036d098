"""Runs the tests of each framework with its oldest supported release, in an environment of its own.

``make test-frameworks`` calls it. ``ARGS="lightning"`` runs those of one framework.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "limpet" / "integrations"
PACKAGES = {
    "lightning": [],
    "transformers": ["accelerate", "peft", "trl", "datasets"],
    "accelerate": ["transformers"],
}
"""By framework: what its tests need in addition, in the releases of the time. torchtitan has only
one supported release, which ``make test`` tests."""

TOOLS = ("torch==2.13.0", "numpy", "torchdata", "pytest>=8", "hypothesis>=6.100")


def find_oldest(framework):
    """Return the oldest release that an integration says it supports, such as "2.5"."""
    text = (SOURCES / f"{framework}.py").read_text()
    (oldest,) = re.findall(rf'check_release\("{framework}", "([\d.]+)"', text)
    return oldest


def make_environment(framework):
    """Return the Python of the environment of a framework, which is created unless it exists."""
    folder = ROOT / ".oldest" / framework
    oldest = f"{framework}=={find_oldest(framework)}.0"
    wanted = " ".join([oldest, *PACKAGES[framework], *TOOLS])
    ready, python = folder / "packages", str(folder / "bin" / "python")
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, TOOLS[0]], check=True)
        subprocess.run([*install, *wanted.split(" "), "-e", "."], cwd=ROOT, check=True)
        ready.write_text(wanted)
    return python


def main():
    failed = []
    for framework in sys.argv[1:] or PACKAGES:
        python = make_environment(framework)
        print(f"{framework} {find_oldest(framework)}: ", end="", flush=True)
        tests = f"tests/frameworks/test_{framework}.py"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        failed += [framework] if done.returncode else []
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
