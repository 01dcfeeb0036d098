"""The names of a user's functions, and what the errors of their import advise."""

import sys

import pytest

from limpet.errors import LimpetError
from limpet.evaluation.functions import FunctionName

UNGUARDED = """
import limpet
def setup(state): return state
def evaluate(model, batch): return {"a": (1.0, 1)}
def data(): return [1]
limpet.Evaluation(".", setup, evaluate, data=data, workers=1)
"""


class Scoring:
    def evaluate(self, model, batch):
        return {}

    @classmethod
    def setup(cls, state):
        return state


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scoring_of_user.py").write_text("def setup(state): return state\n")
    (tmp_path / "wrong_of_user.py").write_text("def setup(state)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nowhere_of_user.part:setup", "ModuleNotFoundError"),
        ("./scoring_of_user.py:setup", "ModuleNotFoundError|TypeError"),
        ("scoring_of_user:missing", "AttributeError"),
        ("wrong_of_user:setup", "SyntaxError"),
    ],
)
def test_the_error_of_an_import_says_what_was_found_and_what_to_do(folder, name, found):
    message = f"cannot be imported.*found ({found}): .*Start the command in the folder"
    with pytest.raises(LimpetError, match=message):
        FunctionName.of(name, "setup").resolve()


def test_a_script_that_starts_an_evaluation_on_import_gets_the_advice(folder, monkeypatch):
    script = folder / "script.py"
    script.write_text(UNGUARDED)
    monkeypatch.chdir(folder)
    with pytest.raises(LimpetError, match="cannot be imported") as caught:
        FunctionName("__main__", "setup", str(script)).resolve()
    text = str(caught.value)
    assert "found the script starts an evaluation with the function setup." in text
    assert '`if __name__ == "__main__":`' in text
    assert text.count("cannot be imported") == 1
    assert "__evaluation_main__" not in sys.modules


def test_a_method_of_an_object_is_refused_because_a_worker_has_no_such_object():
    with pytest.raises(LimpetError, match="Another process cannot import the function evaluate"):
        FunctionName.of(Scoring().evaluate, "evaluate")
    assert FunctionName.of(Scoring.setup, "setup").resolve()(3) == 3
