"""The layout of the package: small packages that say what they are for, and no import cycle."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import grimp
import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
TESTS = Path(__file__).parent
PACKAGES = sorted(p.parent for p in ROOT.rglob("__init__.py") if p.parent != ROOT)
MAX_MODULES = 13


def name_of(package: Path) -> str:
    return package.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", [ROOT, *PACKAGES], ids=name_of)
def test_a_package_has_few_modules(package: Path) -> None:
    modules = [p for p in package.glob("*.py") if p.name != "__init__.py"]
    assert len(modules) <= MAX_MODULES


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_package_states_its_purpose_and_what_it_may_import(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    purpose, _, rest = docstring.partition("\n")
    assert purpose.endswith(".")
    assert "May import: " in rest


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with several modules (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in imports[module]:
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in imports:
        if module not in order:
            visit(module)
    return found


def test_cycles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert cycles(imports) == [["b", "c"]]


def test_there_is_no_import_cycle_even_for_type_checking() -> None:
    """import-linter checks the layers between packages; this checks the modules within them, and
    counts imports under ``TYPE_CHECKING`` and inside functions."""
    graph = grimp.build_graph("holdfast", exclude_type_checking_imports=False)
    assert len(graph.modules) > 150
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        found = cycles({m: graph.find_modules_directly_imported_by(m) for m in graph.modules})
    finally:
        sys.setrecursionlimit(limit)
    assert found == []


def test_the_folders_of_tests_mirror_the_packages() -> None:
    mirrored = {"data", "engine", "format", "interop", "run", "sinks", "storage", "training"}
    mirrored |= {"cli", "integrations", "testing"}
    assert mirrored == {p.name for p in PACKAGES if p.parent == ROOT}
    for package in PACKAGES:
        if package.parent in (ROOT, ROOT / "engine"):
            folder = TESTS / name_of(package)
            assert list(folder.rglob("test_*.py")), folder
