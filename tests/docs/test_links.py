"""Test the links to repository files and the line lengths of the documents."""

import re
from pathlib import Path

import pytest
from bench.report import Section, render

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SECTION_LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]*)#([^)\s]+)\)")


def headings(document):
    """The anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_refer_to_existing_files(document):
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_to_sections_refer_to_existing_headings(document):
    for target, anchor in SECTION_LINK.findall(FENCE.sub("", document.read_text())):
        other = document.parent / target if target else document
        if other.suffix == ".md" and other.exists():
            assert anchor in headings(other), f"{document.name} links to {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_lines_have_at_most_120_characters(document):
    """Table rows are exempt because Markdown cannot wrap them."""
    lines = document.read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_a_report_wraps_the_errors_of_what_it_could_not_measure():
    missing = ["a library, save: " + "a long message of another library, " * 10]
    lines = render(Section("A title", "A text.", [], missing=missing), markdown=True).splitlines()
    assert max(map(len, lines)) <= 120
    assert " ".join(line.strip() for line in lines).count("of another library") == 10
