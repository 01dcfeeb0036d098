"""The former name of the package is gone."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
OLD = "hold" + "fast"
ALLOWED = {"docs/decisions/0085-the-name.md", "src/limpet/format/sealed.py"}
"""The record of the change, and the error for files that the package wrote under that name."""
FOLDERS = (".ci", ".github", "bench", "changes", "docs", "examples", "src", "tests")


def test_the_former_name_occurs_only_where_it_must():
    paths = [*ROOT.iterdir(), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    files = [p for p in paths if p.is_file() and "__pycache__" not in p.parts]
    assert len(files) > 500
    names = {f.relative_to(ROOT).as_posix() for f in files}
    assert not {name for name in names if OLD in name.lower()}
    found = {
        f.relative_to(ROOT).as_posix() for f in files if OLD.encode() in f.read_bytes().lower()
    }
    assert found == ALLOWED
    assert (ROOT / "src/limpet/format/sealed.py").read_text().lower().count(OLD) == 1
