"""What the documents say is run: every block of Python, and the commands that stand alone.

The blocks of one document run in order, in one namespace and one empty folder. ``python`` marks
code that runs as it stands; code that is only to be read is marked ``text``. In ``console`` blocks
the lines that begin with ``$ holdfast`` are run; the rest is what they print.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOOL = Path(sys.executable).with_name("holdfast")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(m[1].strip(), m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)
    ]


def runnable(document: Path) -> bool:
    return any(b.language in ("python", "console") for b in blocks(document))


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if runnable(d)], ids=named)
def test_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.language == "python":
            # so many empty lines before it that a traceback names the document's line
            source = "\n" * (block.line - 1) + block.code
            exec(compile(source, str(document), "exec"), namespace)
        elif block.language == "console":
            run_commands(block, tmp_path)


def run_commands(block: Block, folder: Path) -> None:
    """Run the block's commands; each must succeed."""
    commands = [line[2:] for line in block.code.splitlines() if line.startswith("$ holdfast ")]
    assert commands, f"line {block.line}: no command in this block"
    for command in commands:
        words = shlex.split(command)
        done = subprocess.run(
            [TOOL, *words[1:]],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_languages_are_known(document: Path) -> None:
    """A block whose language is misspelt would silently not be run."""
    assert {b.language for b in blocks(document)} <= {"python", "console", "text", "json", "sh", ""}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 135
