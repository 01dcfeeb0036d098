"""The pages of docs/migration are short, and what their tables say of Limpet exists."""

import ast
import inspect
import re

import pytest

import limpet
from limpet.preemption import CallNotice, PreemptionGuard
from limpet.tasks import EvaluationSide, Queue
from tests.cli.invoke import run_cli
from tests.docs.test_docs import ROOT, document_id

PAGES = sorted((ROOT / "docs" / "migration").glob("*.md"))
OBJECTS = {
    "limpet": limpet,
    "ckpt": limpet.Checkpointer,
    "Checkpointer": limpet.Checkpointer,
    "CallNotice": CallNotice,
    "PreemptionGuard": PreemptionGuard,
    "guard": PreemptionGuard,
    "pending": limpet.Pending,
    "queue": Queue,
    "queue.evaluation": EvaluationSide,
    "snapshot": limpet.Snapshot,
}


def rows(page):
    """The two cells of each row of the table."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def codes(page):
    """What the table has in backquotes on the side of Limpet."""
    return [code for _, ours in rows(page) for code in re.findall(r"`([^`]+)`", ours)]


def find(node):
    """The object that an expression names, or None."""
    if (name := ast.unparse(node)) in OBJECTS:
        return OBJECTS[name]
    if isinstance(node, ast.Attribute) and (owner := find(node.value)) is not None:
        return getattr(owner, node.attr)
    return None


def check_call(call):
    """Assert that a call may have these arguments, and has all that it needs, without ``...``."""
    if (function := find(call.func)) is None:
        return
    signature = inspect.signature(function)
    bind = signature.bind_partial if "..." in ast.unparse(call) else signature.bind
    of_object = inspect.isfunction(function) and "." in function.__qualname__
    args = [None] * of_object + [arg for arg in call.args if ast.unparse(arg) != "..."]
    bind(*args, **{keyword.arg: None for keyword in call.keywords if keyword.arg})


@pytest.mark.parametrize("page", PAGES, ids=document_id)
def test_a_page_is_short(page):
    assert len(page.read_text().split()) <= 480
    assert 10 <= len(rows(page)) <= 19


@pytest.mark.parametrize("page", PAGES, ids=document_id)
def test_the_calls_exist(page):
    found = 0
    for code in codes(page):
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and find(node.value) is not None:
                assert find(node) is not None, code
                found += 1
            if isinstance(node, ast.Call):
                check_call(node)
    assert found > 5


@pytest.mark.parametrize("page", PAGES, ids=document_id)
def test_the_commands_and_their_options_exist(page):
    for _, ours in rows(page):
        verb = "evaluate"  # whose options some cells have alone
        for code in re.findall(r"`([^`]+)`", ours):
            if command := re.match(r"limpet (\w+)", code):
                verb = command[1]
            if options := re.findall(r"--[a-z-]+", code):
                text = run_cli(verb, "--help").out
                assert [option for option in options if option not in text] == []
