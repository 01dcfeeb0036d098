"""The completion of shells, and ``--json`` anywhere on the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import limpet
from limpet.cli import VERBS, cli, completion
from tests.cli.invoke import run_cli

LIMPET = Path(sys.executable).with_name("limpet")
DOCUMENT = Path(__file__).parents[2] / "docs" / "commands.md"


def complete(shell, *words):
    """Return what the shell is told: type and value of each completion."""
    env = {
        **os.environ,
        "_LIMPET_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(["limpet", *words]),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
    }
    done = CliRunner().invoke(cli, [], env=env, prog_name="limpet")
    assert (done.exit_code, done.stderr) == (0, "")
    if shell == "zsh":
        lines = done.stdout.splitlines()
        return [list(pair) for pair in zip(lines[::3], lines[1::3], strict=True)]
    if shell == "fish" and "\t" in done.stdout:
        return [line.split("\t")[0].split(",", 1) for line in done.stdout.splitlines()]
    return [line.split(",", 1) for line in done.stdout.splitlines() if line]


def test_every_shell_completes_commands():
    assert complete("bash", "sh") == [["plain", "show"]]
    assert complete("zsh", "sh") == [["plain", "show"]]
    assert [v for _, v in complete("bash", "")] == list(VERBS)
    fish = {value.partition("\n")[0] for pair in complete("fish", "sh") for value in pair}
    assert "show" in fish


def test_options_and_paths_are_completed():
    assert complete("bash", "show", "--de") == [["plain", "--depth"]]
    assert complete("bash", "export", "a", "--to", "s") == [["plain", "safetensors"]]
    for verb in ("show", "ls", "copy", "rm"):
        assert complete("bash", verb, "runs/") == [["file", "runs/"]]
    assert complete("bash", "rm", "runs/a", "1") == []  # a step


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """Make the run ``runs/a`` with versions 5, 50, and 120, and an uncommitted save of step 51."""
    monkeypatch.chdir(tmp_path)
    for step in (5, 50, 120):
        limpet.save(f"runs/a/version_{step}", {"n": step})
    Path("runs/a/version_51").mkdir()
    return tmp_path


@pytest.mark.usefixtures("run_folder")
def test_the_steps_of_a_local_run_are_completed():
    def plain(*values):
        return [["plain", value] for value in values]

    for shell in ("zsh", "fish"):
        whole = complete(shell, "show", "runs/a@5")
        assert [value for _, value in whole] == ["runs/a@5", "runs/a@50"]
    assert complete("zsh", "copy", "runs/a@", "out") == [["file", "out"]]
    assert complete("bash", "rm", "runs/a", "5") == plain("5", "50")
    assert complete("bash", "pin", "runs/a", "") == plain("5", "50", "120")
    assert complete("zsh", "rm", "runs/a@5", "runs/a@1") == plain("runs/a@120")
    # bash splits words at "@", which it replaces, too; without its option hostcomplete, it does not
    assert complete("bash", "show", "runs/a", "@") == plain("@5", "@50", "@120")
    assert complete("bash", "show", "runs/a", "@", "12") == plain("@120")
    assert complete("bash", "show", "runs/a@12") == plain("runs/a@120")
    assert complete("bash", "diff", "runs/a", "@", "5", "runs/a", "@", "1") == plain("@120")
    for words in (
        ["show", "runs/a@9"],
        ["show", "runs/b@"],
        ["show", "s3://b/a@"],
        ["ls", "runs/a@"],
    ):
        assert complete("zsh", *words) == [["file", words[-1]]]
    limpet.save("runs/a/version_5.1", {"n": 5}, step=5)  # @5 may be 5.0 or 5.1
    assert complete("zsh", "show", "runs/a@5") == plain("runs/a@5.0", "runs/a@5.1", "runs/a@50.0")


@pytest.mark.usefixtures("run_folder")
def test_a_folder_that_does_not_answer_is_not_waited_for(monkeypatch):
    answer = threading.Event()

    def hang(run, start):
        answer.wait(20)
        return ["5"]

    monkeypatch.setattr(completion, "_list_steps", hang)
    monkeypatch.setattr(completion, "_SECONDS", 0.01)
    assert completion._offer_steps("runs/a", "") == []
    answer.set()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_what_a_user_types_into_bash(run_folder):
    typed = (
        f'PATH={LIMPET.parent}:$PATH; eval "$(_LIMPET_COMPLETE=bash_source limpet)"\n'
        "limpet show runs/a@12\t --json > shown\n"
        "limpet pin runs/a 12\t > pinned\n"
        "exit\n"
    )
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, typed.encode())
        command = ["bash", "--norc", "--noprofile", "-i"]
        with (run_folder / "log").open("wb") as log:
            subprocess.run(
                command, stdin=terminal, stdout=log, stderr=log, timeout=120, check=False,
                start_new_session=True,
            )  # fmt: skip
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert json.loads((run_folder / "shown").read_text())["step"] == 120
    assert (run_folder / "pinned").read_text() == "version_120 is pinned\n"


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_in_the_document_works(shell, tmp_path):
    line = re.search(
        rf"^.*_LIMPET_COMPLETE={shell}_source.*?(?=  +#)", DOCUMENT.read_text(), re.MULTILINE
    )
    assert line is not None
    env = {**os.environ, "PATH": f"{LIMPET.parent}:{os.environ['PATH']}"}
    source = subprocess.run(
        [LIMPET], env={**env, "_LIMPET_COMPLETE": f"{shell}_source"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert "_limpet_completion" in source.stdout
    if shell != "bash" or shutil.which("bash") is None:
        return  # the protocol is tested above
    script = f"{line[0]}\nCOMP_WORDS=(limpet sh) COMP_CWORD=1\n_limpet_completion limpet\n"
    script += 'echo "${COMPREPLY[@]}"\n'
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("show\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "ls", "RUN"], ["ls", "--json", "RUN"], ["ls", "RUN", "--json"],
        ["--json", "ls", "RUN", "--json"],
    ],
)  # fmt: skip
def test_json_may_be_anywhere(run, arguments):
    result = run_cli(*[run if a == "RUN" else a for a in arguments])
    assert (result.code, result.err) == (0, "")
    assert [v["step"] for v in result.json["versions"]] == [20, 40, 60]
    assert run_cli("ls", run).out.startswith(run)  # it does not stay on


def test_show_respects_depth_in_json(tmp_path):
    state = {"model": {"fc": {"w": np.zeros(4), "n": 1}, "b": np.zeros(2)}, "step": 7}
    limpet.save(tmp_path / "version_1", state, step=1)

    def shown(*options):
        document = run_cli("show", tmp_path / "version_1", "--json", *options).json
        keys = [[row["key"] for row in document[kind]] for kind in ("leaves", "values")]
        return keys[0], keys[1], document["collapsed"]

    everything = ["model/fc/w", "model/b"], ["model/fc/n", "step"]
    fc = {"key": "model/fc", "kind": "dict", "leaves": 2, "bytes": 32}
    model = {"key": "model", "kind": "dict", "leaves": 3, "bytes": 48}
    assert shown() == (*everything, [])
    assert shown("--depth", 1) == ([], ["step"], [model])
    assert shown("--depth", 2) == (["model/b"], ["step"], [fc])
    assert shown("--depth", 3) == shown("--depth", 9) == (*everything, [])
    assert shown("--all") == (*everything, [])
