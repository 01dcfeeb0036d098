"""``make compare`` measures, and docs/comparison.md has what it has written."""

import re
from importlib.util import find_spec

import pytest

from tests.frameworks.compare import BEGIN, CASES, END, PAGE, measure
from tests.frameworks.harness import Process


def test_the_page_has_a_row_for_each_case():
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)[1:]
    assert [(name, own.split(": ")[0]) for name, _, own in rows] == [(c.name, c.own) for c in CASES]
    assert all(re.search(r"\ball \d+ leaves identical$", ours) for _, ours, _ in rows)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("training", ["lightning", "accelerate"])
def test_a_case_is_measured(tmp_path, training):
    case = next(case for case in CASES if case.training == training)
    found = []
    process = Process("tests.frameworks.compared_trainings")
    for name in ("ours", "own"):
        (tmp_path / name).mkdir()
        found.append(measure(process, case, name == "own", tmp_path / name))
    process.close()
    assert re.fullmatch(r"all \d+ leaves identical", found[0])
    assert re.fullmatch(r"\d+ of \d+ leaves differ", found[1])
