"""Processes that torchrun started, before and after ``init_process_group``."""

import contextlib
import inspect
import sys
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError
from limpet.ranks import group
from limpet.settings import read_settings
from tests.fakegroup import FakeGroup
from tests.interrupts import InterruptOpcode


@pytest.fixture
def started_by_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_a_save_before_init_process_group_is_refused(started_by_torchrun, tmp_path):
    state = {"w": np.zeros(3)}
    for call in (
        lambda: limpet.save(tmp_path / "a", state),
        lambda: limpet.save_async(tmp_path / "a", state),
        lambda: limpet.Checkpointer(tmp_path / "run", state),
    ):
        with pytest.raises(LimpetError, match="torchrun started 4 processes") as e:
            call()
        assert "init_process_group" in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_loads_and_saves_with_a_known_group_are_allowed(started_by_torchrun, tmp_path):
    state = {"w": np.ones(3)}
    limpet.save(tmp_path / "a", state, group="alone")
    live = {"w": np.zeros(3)}
    limpet.load(tmp_path / "a", into=live)
    assert live["w"].sum() == 3
    assert limpet.load(tmp_path / "a")["w"].sum() == 3
    with FakeGroup(2) as ranks:
        ranks.run(lambda rank: limpet.save(tmp_path / "b", state))


def test_a_world_size_that_torchrun_did_not_set_is_ignored(monkeypatch, tmp_path):
    assert read_settings({"WORLD_SIZE": "4"}).launched_world_size == 1
    assert (
        read_settings({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "many"}).launched_world_size == 1
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    limpet.save(tmp_path / "a", {"n": 1})


def test_an_interrupted_call_leaves_no_group_behind(started_by_torchrun, tmp_path):
    """Ctrl-C at any opcode that handles ``group="alone"``. A notebook keeps the last exception."""
    state = {"w": np.zeros(3)}
    limpet.save(tmp_path / "0", state, group="alone")
    calls: dict[str, Callable[[int], object]] = {
        "save": lambda n: limpet.save(tmp_path / f"{n}", state, group="alone"),
        "load": lambda n: limpet.load(tmp_path / "0", into=dict(state), group="alone"),
    }
    codes = {inspect.unwrap(f).__code__ for f in (limpet.save, limpet.load)}
    files = {group.__file__, contextlib.__file__}

    def is_traced(frame):
        """Return True for the calls, what they call in these files, and what that calls there."""
        caller = frame.f_back
        return frame.f_code in codes or (
            frame.f_code.co_filename in files and caller is not None and is_traced(caller)
        )

    for name, call in calls.items():
        kept: list[BaseException] = []
        for at in count(1):
            interrupt = InterruptOpcode(at, is_traced)
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                call(at)
            except KeyboardInterrupt as e:
                kept.append(e)
            finally:
                sys.settrace(before)
            with pytest.raises(LimpetError, match="torchrun started 4 processes"):
                limpet.save(tmp_path / "refused", state)
            if interrupt.seen < at:
                break
        assert len(kept) > 40, name
