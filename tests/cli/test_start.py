"""How a command starts and ends as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf

IMPORTED = """
import sys
from holdfast.cli import cli
try:
    cli.main(sys.argv[1:], prog_name="holdfast")
except SystemExit:
    pass
print(*sorted({m.partition(".")[0] for m in sys.modules}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("start") / "run"
    for step in (1, 2):
        hf.save(place / f"version_{step}", {"x": np.arange(3.0) * step})
    return place


def imported(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=True
    )
    json.loads(done.stdout)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "diff", "sweep"])
def test_json_needs_neither_torch_nor_rich(run: Path, verb: str) -> None:
    places = {"ls": [run], "verify": [run], "sweep": [run], "show": [run / "version_1"]}
    chosen = places.get(verb, [run / "version_1", run / "version_2"])
    assert not imported(verb, *map(str, chosen), "--json") & {"torch", "rich"}


def test_copy_needs_neither(run: Path, tmp_path: Path) -> None:
    assert not imported("copy", str(run), str(tmp_path / "to"), "--json") & {"torch", "rich"}


def test_the_command_ends_with_its_exit_code(run: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli"]
    done = subprocess.run([*command, "ls", run], capture_output=True, text=True, check=True)
    assert "latest" in done.stdout
    assert done.stderr == ""
    done = subprocess.run(
        [*command, "show", run / "version_3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_left_is_no_error(run: Path) -> None:
    script = f"{sys.executable} -m holdfast.cli ls {run} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["141"]
