"""What a worker says of an error: the line of the user, and the line that raised."""

from __future__ import annotations

import json
from typing import Any

from limpet.errors import LimpetError
from limpet.evaluation.process import answer, describe


def call_library(text: str) -> Any:
    return json.loads(text)


def test_an_error_of_a_library_names_the_line_of_the_user_too() -> None:
    line = call_library.__code__.co_firstlineno + 1
    text = answer(lambda: call_library("{")).text
    assert text.startswith("JSONDecodeError: Expecting")
    assert f"(test_process.py:{line}, decoder.py:" in text


def test_an_error_of_the_user_names_its_line_once() -> None:
    def fail() -> None:
        raise ValueError("two\nlines")

    line = fail.__code__.co_firstlineno + 1
    assert answer(fail).text == f"ValueError: two lines (test_process.py:{line})"


def test_an_error_of_limpet_or_without_a_traceback_has_no_line() -> None:
    assert describe(LimpetError("a", found="b")) == "a. Found b."
    assert describe(ValueError("a")) == "ValueError: a"
