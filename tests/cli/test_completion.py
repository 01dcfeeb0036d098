"""The completion of shells."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from limpet.cli import VERBS, cli

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
