"""What a worker says of an error: the line of the user, and the line that raised."""

import json

import pytest

from limpet.errors import LimpetError
from limpet.evaluation.functions import FunctionName
from limpet.evaluation.worker import Work, Worker, describe
from limpet.tasks import Queue


def call_library(text):
    return json.loads(text)


def describe_error(call):
    with pytest.raises(Exception) as caught:
        call()
    return describe(caught.value)


def test_an_error_of_a_library_names_the_line_of_the_user_too():
    line = call_library.__code__.co_firstlineno + 1
    text = describe_error(lambda: call_library("{"))
    assert text.startswith("JSONDecodeError: Expecting")
    assert f"(test_worker.py:{line}, decoder.py:" in text


def test_an_error_of_the_user_names_its_line_once():
    def fail():
        raise ValueError("two\nlines")

    line = fail.__code__.co_firstlineno + 1
    assert describe_error(fail) == f"ValueError: two lines (test_worker.py:{line})"


def test_a_worker_that_cannot_import_the_functions_leaves_its_task_to_others():
    """It would take one task after the other, and let all of them fail."""
    names = {
        label: FunctionName("no.such.module", label) for label in ("setup", "evaluate", "data")
    }
    work = Work("evaluate", names, 1, records=5)
    queue = Queue(attempts=1)
    job = queue.add("evaluation", {work.encode(): 5}, task_size=5, name="e")
    task = queue.evaluation.get()
    assert task is not None
    with pytest.raises(LimpetError, match=r"cannot take part: no\.such\.module:setup"):
        Worker().do(task)
    assert job.error is None
    assert queue.evaluation.get("another worker") is not None
