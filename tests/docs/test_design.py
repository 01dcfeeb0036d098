"""docs/design.md names files, functions, and tests that exist."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "limpet"
DESIGN = (ROOT / "docs" / "design.md").read_text()


def section(title):
    """The text of one section, without its heading."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DESIGN, re.M | re.S)
    assert match is not None, title
    return match[1]


def rows(title):
    """The cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def resolve(name):
    """The object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_the_glossary_has_one_row_per_term_in_alphabetical_order():
    terms = [row[0] for row in rows("Glossary")]
    assert len(terms) >= 24
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("row", rows("Glossary"), ids=lambda row: row[0])
def test_every_term_names_something_that_exists(row):
    _, meaning, name = row
    assert meaning
    assert resolve(name.strip("`")) is not None


def test_the_reading_list_is_short_and_its_files_exist():
    files = re.findall(r"^\d+\. `([^`]+)`", section("Reading list"), re.M)
    assert 1 <= len(files) <= 12
    for file in files:
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("row", rows("Where do I add ..."), ids=lambda row: row[0])
def test_what_to_copy_and_which_test_to_run_exist(row):
    _, _, copy, test = row
    paths = re.findall(r"`((?:src|tests)/[^`]+)`", f"{copy} {test}")
    assert len(paths) >= 2, row
    for path in paths:
        assert (ROOT / path).is_file(), path


def test_the_diagram_shows_every_package():
    diagram = section("The packages").split("```")[1]
    shown = set(re.findall(r"^ *([a-z]+)(?: +([a-z]+))?(?: +([a-z]+))?", diagram, re.M))
    names = {name for line in shown for name in line if name}
    packages = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert packages <= names


WALKS = DESIGN.partition("## Glossary")[0]
FOREIGN = (
    "LIMPET_", "SystemExit", "MADV_", "torch.", "optimizer.", "model.", "load_state_dict",
    "state_dict",
)  # fmt: skip
"""How names begin that the text takes from elsewhere."""


def test_every_module_that_the_text_names_exists():
    files = ["/" + p.as_posix() for p in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]]
    for name in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", WALKS)):
        assert any(file.endswith("/" + name) for file in files), name


def test_every_function_and_class_that_the_text_names_exists():
    defined = {"VERBS"}
    for path in PACKAGE.rglob("*.py"):
        defined |= {path.stem, path.parent.name}
        module = ast.parse(path.read_text())
        for statement in module.body:
            if isinstance(statement, ast.Assign):  # such as an alias of a union
                defined |= {name.id for name in statement.targets if isinstance(name, ast.Name)}
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
    for name in sorted(set(re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)`", WALKS))):
        if not name.startswith(FOREIGN) and not name.endswith(".py"):
            assert name.rpartition(".")[2] in defined, name
