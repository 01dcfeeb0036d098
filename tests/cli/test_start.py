"""Commands in a process: imports, exit codes, and closed pipes."""

import gc
import json
import subprocess
import sys

import numpy as np
import pytest

import limpet as hf
from limpet.cli import watch
from tests.cli.invoke import run_cli

COMMANDS = """
import json, sys
from limpet.cli import cli
for arguments in json.loads(sys.argv[1]):
    try:
        cli.main([*arguments, "--json"])
    except SystemExit as e:
        assert e.code in (0, 7), arguments
    assert not {"torch", "rich"} & sys.modules.keys(), arguments
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "run"
    for step in (1, 2):
        hf.save(folder / f"version_{step}", {"x": np.arange(3.0) * step})
    return folder


def test_json_needs_neither_torch_nor_rich(run, tmp_path):
    one, two = (f"{run}/version_{step}" for step in (1, 2))
    commands = [
        ["ls", run], ["verify", run], ["sweep", run], ["show", one], ["diff", one, two],
        ["copy", run, tmp_path / "to"], ["request-save", run, "--no-wait"],
        ["export", one, "--to", "hf", tmp_path / "out"],
    ]  # fmt: skip
    texts = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, texts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_process_returns_the_exit_code(run):
    command = [sys.executable, "-m", "limpet"]
    done = subprocess.run([*command, "ls", run], capture_output=True, text=True, check=True)
    assert "latest" in done.stdout
    assert done.stderr == ""
    done = subprocess.run(
        [*command, "show", run / "version_3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(run):
    script = f"{sys.executable} -m limpet ls {run} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["141"]


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--sort", "?"], ["none"], ["--help"]])
def test_a_command_changes_the_garbage_collector_only_while_it_runs(run, arguments, monkeypatch):
    before = gc.get_threshold()
    seen: list[int] = []

    def observe(*_):
        seen.append(gc.get_threshold()[0])

    monkeypatch.setattr(watch, "print_result", observe)
    verb, *options = arguments
    run_cli(verb, *([run] if verb == "ls" else []), *options)
    assert len(seen) == (arguments == ["ls"])
    assert all(threshold > before[0] for threshold in seen)
    assert gc.get_threshold() == before
