"""Run the code blocks of the documents: every Python block, and the commands.

The blocks of one document run in order, in one namespace and in one folder that is empty at first.
``python`` marks complete code, and ``python FILE`` a script, which is written to that file. A
``diff FILE`` block has all lines of a script before and after a change: the file, if there is one,
must be as before, and is then as after. Code that cannot run on its own is marked ``text``. In
``console`` blocks, the lines run that begin with ``$ limpet``, ``$ python``, or ``$ torchrun``.
What follows a command is its output, and an ``output`` block is that of the Python block before it.
``...`` in an output stands for any text.
"""

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"^\$ ((?:[A-Z_]+=\S+ )*(?:limpet|python|torchrun) .*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


LIBRARIES = {
    "lightning.md": ["lightning"],
    "accelerate.md": ["accelerate"],
    "fabric.md": ["lightning"],
    "transformers.md": ["transformers"],
}
"""The libraries that a document needs, which may not be installed (the group ``zoo``)."""


@dataclass(frozen=True)
class Block:
    language: str
    file: str
    code: str
    line: int


def blocks(document):
    text = document.read_text()
    found = []
    for match in FENCE.finditer(text):
        language, _, file = match[1].strip().partition(" ")
        found.append(Block(language, file, match[2], text.count("\n", 0, match.start(2)) + 1))
    return found


def sides_of_diff(code):
    """Return the script before and after the change."""
    lines = code.splitlines(keepends=True)
    assert all(line[0] in " +-\n" for line in lines)
    before = "".join(line[1:] or line for line in lines if line[0] != "+")
    return before, "".join(line[1:] or line for line in lines if line[0] != "-")


def runnable(document):
    return any(b.language in ("python", "console") for b in blocks(document))


def document_id(document):
    return str(document.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if runnable(d)], ids=document_id)
def test_code_blocks_run_without_errors(document, tmp_path, monkeypatch):
    for library in LIBRARIES.get(document.name, []):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    for block in blocks(document):
        if block.language == "python" and block.file:
            Path(block.file).write_text(block.code)
        elif block.language == "diff":
            before, after = sides_of_diff(block.code)
            file = Path(block.file)
            assert not file.exists() or file.read_text() == before, f"line {block.line}"
            file.write_text(after)
        elif block.language == "python":
            # empty lines in front make tracebacks show the line of the document
            source = "\n" * (block.line - 1) + block.code
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, str(document), "exec"), namespace)
        elif block.language == "output":
            check_output(printed.getvalue(), block.code, f"line {block.line}")
        elif block.language == "console":
            run_commands(block, tmp_path)


def run_commands(block, folder):
    """Run the commands of a block. Assert that each succeeds, or is killed as its output says."""
    commands = COMMAND.findall(block.code)
    assert commands, f"line {block.line}: no command in this block"
    for command, output in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={
                **os.environ,
                "COLUMNS": "110",
                "PYTHONUNBUFFERED": "1",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if output:
            killed = "Killed\n" if done.returncode == -signal.SIGKILL else ""
            # the documents show what a person sees on a terminal
            found = re.sub(
                "^limpet: (?=started|resumed|finished|stopped by)", "", done.stdout, flags=re.M
            )
            check_output(found + killed, output, command)
        assert done.returncode == 0 or output.endswith("Killed\n"), f"{command}: {done}"


def check_output(found, shown, where):
    """Assert that the output is the one that the document shows, with any spaces in its lines."""
    pattern, found = (
        "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
        for text in (shown, found)
    )
    regex = ".*".join(map(re.escape, pattern.split("...")))
    assert re.fullmatch(regex, found, re.DOTALL), f"{where}: {found}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=document_id)
def test_code_blocks_have_known_languages(document):
    """Without this test, a block with a misspelled language would be skipped silently."""
    known = {"python", "diff", "output", "console", "text", "json", "sh", ""}
    assert {b.language for b in blocks(document)} <= known


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 135
