"""docs/README.md names every page, and docs/reference.md is current."""

from __future__ import annotations

import re

from tests.docs.reference import PAGE, render
from tests.docs.test_docs import ROOT

DOCS = ROOT / "docs"
INDEX = (DOCS / "README.md").read_text()


def test_every_page_is_in_the_index() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    missing = pages - set(re.findall(r"\]\(([\w-]+\.md)\)", INDEX))
    assert not missing, f"add a line to docs/README.md for {sorted(missing)}"


def test_the_reference_is_current() -> None:
    assert PAGE.read_text() == render(), "a docstring has changed: run `make reference`"
