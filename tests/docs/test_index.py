"""docs/README.md and the site name every page, and the reference has every public name."""

import re

import limpet
from tests.docs.reference import render
from tests.docs.site import MOVED
from tests.docs.test_docs import ROOT

DOCS = ROOT / "docs"
MODULES = ["errors", "preemption", "sinks", "tables", "tasks"]
"""The public names that are modules; the reference has their names."""
INDEX = (DOCS / "README.md").read_text()


def test_every_page_is_in_the_index():
    found = [*DOCS.glob("*.md"), *DOCS.glob("migration/*.md"), *DOCS.glob("frameworks/*.md")]
    pages = {path.relative_to(DOCS).as_posix() for path in found} - {"README.md"}
    missing = pages - set(re.findall(r"\]\(([\w/-]+\.md)\)", INDEX))
    assert not missing, f"add a line to docs/README.md for {sorted(missing)}"


def test_every_page_is_in_the_navigation_of_the_site():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    pages = {page for page in pages - {"README.md"} if not page.startswith("decisions/")}
    pages |= {*MOVED.values()} | {f"reference/{page}" for page in render()}
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    assert sorted(re.findall(r"[\w./-]+\.md", navigation)) == sorted(pages)


def test_the_reference_has_every_public_name():
    text = render()["limpet.md"]
    assert [name for name in limpet.__all__ if f"## `limpet.{name}`" not in text] == MODULES
