"""The step gate of one rank: races between training and watcher, waits, and what ends a wait."""

import sys
import threading
import time
from collections.abc import Callable

import pytest

from limpet.ranks.step_gate import NEVER, NO_ACTIONS, StepGate

SAVE = frozenset({"save"})


class HookedGate(StepGate):
    """A gate that runs a hook right before a given attribute is written or read. The hook simulates
    another thread."""

    hooks: dict[str, Callable[[], object]]

    def __init__(self):
        self.hooks = {}
        super().__init__(1.0)

    def __setattr__(self, name, value):
        self._run_hook(f"write {name}")
        super().__setattr__(name, value)

    def __getattribute__(self, name):
        if name in ("current_step", "_stop_at"):
            self._run_hook(f"read {name}")
        return super().__getattribute__(name)

    def _run_hook(self, moment):
        hook = self.__dict__.get("hooks", {}).pop(moment, None)
        if hook is not None:
            hook()


@pytest.mark.parametrize("moment", ["write _stop_at", "read current_step", "write _armed_step"])
def test_a_watcher_that_is_delayed_anywhere_detects_a_training_that_passes(moment):
    gate = HookedGate()
    passed: list[bool] = []

    def train():
        # ``step`` would wait forever here, because there is only one thread.
        would_wait = gate.current_step + 1 >= gate._stop_at
        passed.append(not would_wait and gate.step() == NO_ACTIONS)

    gate.hooks[moment] = train
    armed = gate.arm(1)
    assert len(passed) == 1
    assert armed != passed[0]


@pytest.mark.parametrize("moment", ["read current_step", "write current_step", "read _stop_at"])
def test_a_training_that_is_delayed_anywhere_sees_the_gate_or_is_detected(moment):
    gate = HookedGate()
    armed: list[bool] = []

    def watch():
        armed.append(gate.arm(1))
        if armed[0]:
            gate.grant(1, SAVE)

    gate.hooks[moment] = watch
    assert gate.step() == (SAVE if armed[0] else NO_ACTIONS)
    assert len(armed) == 1


def test_no_step_passes_an_armed_gate_when_two_threads_race():
    """The interpreter switches threads as often as possible. In each race, at least one thread
    must see the other."""
    gate = StepGate(60.0)
    got: list[tuple[int, frozenset[str]]] = []
    expected = []
    done = False

    def train():
        while not done:
            if whats := gate.step():
                got.append((gate.current_step, whats))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    training = threading.Thread(target=train)
    try:
        training.start()
        for n in range(40):
            at = gate.current_step + 1 + n % 7
            if gate.arm(at):
                gate.grant(at, SAVE)
                expected.append((at, SAVE))
                while gate._granted:
                    time.sleep(0)
    finally:
        done = True
        training.join(20)
        sys.setswitchinterval(before)
    assert got == expected
    assert gate._stop_at == NEVER
