"""Run the code blocks of the documents: every Python block, and the Holdfast commands.

The blocks of one document run in order, in one namespace and in one folder that is empty at first.
``python`` marks complete code. Code that cannot run on its own is marked ``text``. In ``console``
blocks, the lines that begin with ``$ holdfast`` run; the other lines are their output.
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
HOLDFAST = Path(sys.executable).with_name("holdfast")
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


def document_id(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if runnable(d)], ids=document_id)
def test_code_blocks_run_without_errors(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.language == "python":
            # empty lines in front make tracebacks show the line of the document
            source = "\n" * (block.line - 1) + block.code
            exec(compile(source, str(document), "exec"), namespace)
        elif block.language == "console":
            run_commands(block, tmp_path)


def run_commands(block: Block, folder: Path) -> None:
    """Run the commands of a block, and assert that each succeeds."""
    commands = [line[2:] for line in block.code.splitlines() if line.startswith("$ holdfast ")]
    assert commands, f"line {block.line}: no command in this block"
    for command in commands:
        words = shlex.split(command)
        done = subprocess.run(
            [HOLDFAST, *words[1:]],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=document_id)
def test_code_blocks_have_known_languages(document: Path) -> None:
    """Without this test, a block with a misspelled language would be skipped silently."""
    assert {b.language for b in blocks(document)} <= {"python", "console", "text", "json", "sh", ""}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 135
