"""The layout of the package: small packages that say what they are for, and no import cycle."""

import ast
import re
import sys
from pathlib import Path

import grimp
import pytest

import limpet

ROOT = Path(limpet.__file__).parent
TESTS = Path(__file__).parent
PACKAGES = sorted(p.parent for p in ROOT.rglob("__init__.py") if p.parent != ROOT)


def name_of(package):
    return package.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def graph():
    graph = grimp.build_graph("limpet", exclude_type_checking_imports=False)
    assert len(graph.modules) > 150
    return graph


def owner_of(module):
    """The folder of the package that a module is in, or that it is."""
    path = ROOT.joinpath(*module.split(".")[1:])
    return path if path.is_dir() else path.parent


def docstring_of(package):
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


def allowed_imports(package):
    """The packages that the docstring of a package allows it to import."""
    _, _, allowed = docstring_of(package).partition("May import: ")
    allowed, _, _ = allowed.partition(".")[0].partition(";")
    folders = {ROOT / name for name in re.findall(r"``([\w/]+)``", allowed)}
    assert all(folder.is_dir() for folder in folders), folders
    return {p for p in PACKAGES for folder in folders if p.is_relative_to(folder)} | {ROOT}


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_package_states_its_purpose_its_terms_and_what_it_may_import(package):
    docstring = docstring_of(package)
    purpose, _, rest = docstring.partition("\n")
    assert purpose.endswith(".")
    assert "Terms: " in rest
    assert "May import: the root modules" in rest


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_package_imports_only_what_it_says(package, graph):
    imported = {
        owner_of(other)
        for module in graph.modules
        if owner_of(module) == package
        for other in graph.find_modules_directly_imported_by(module)
    }
    assert imported - {package} <= allowed_imports(package)


def test_the_docstring_limits_the_imports():
    assert allowed_imports(ROOT / "data") == {ROOT}
    below = {ROOT / name for name in ("", "format", "layout", "ranks", "state/arrays")}
    assert allowed_imports(ROOT / "state") == below


def cycles(imports):
    """The strongly connected components with several modules (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module):
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


def test_cycles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert cycles(imports) == [["b", "c"]]


def test_there_is_no_import_cycle_even_for_type_checking(graph):
    """import-linter checks the layers between packages; this checks the modules within them, and
    counts imports under ``TYPE_CHECKING`` and inside functions."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        found = cycles({m: graph.find_modules_directly_imported_by(m) for m in graph.modules})
    finally:
        sys.setrecursionlimit(limit)
    assert found == []


def test_the_folders_of_tests_mirror_the_packages():
    for package in PACKAGES:
        if package.parent == ROOT:
            folder = TESTS / name_of(package)
            assert list(folder.rglob("test_*.py")), folder
