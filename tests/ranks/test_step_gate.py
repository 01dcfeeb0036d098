"""The step gate of one rank: races between training and watcher, waits, and what ends a wait."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from limpet.errors import RankFailed
from limpet.ranks.step_gate import NEVER, NO_ACTIONS, StepGate

SAVE = frozenset({"save"})


class HookedGate(StepGate):
    """A gate that runs a hook right before a given attribute is written or read. The hook simulates
    another thread."""

    hooks: dict[str, Callable[[], object]]

    def __init__(self) -> None:
        self.hooks = {}
        super().__init__(1.0)

    def __setattr__(self, name: str, value: Any) -> None:
        self._run_hook(f"write {name}")
        super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        if name in ("current_step", "_stop_at"):
            self._run_hook(f"read {name}")
        return super().__getattribute__(name)

    def _run_hook(self, moment: str) -> None:
        hook = self.__dict__.get("hooks", {}).pop(moment, None)
        if hook is not None:
            hook()


@pytest.mark.parametrize("moment", ["write _stop_at", "read current_step", "write _armed_step"])
def test_a_watcher_that_is_delayed_anywhere_detects_a_training_that_passes(moment: str) -> None:
    gate = HookedGate()
    passed: list[bool] = []

    def train() -> None:
        # ``step`` would wait forever here, because there is only one thread.
        would_wait = gate.current_step + 1 >= gate._stop_at
        passed.append(not would_wait and gate.step() == NO_ACTIONS)

    gate.hooks[moment] = train
    armed = gate.arm(1)
    assert len(passed) == 1
    assert armed != passed[0]


@pytest.mark.parametrize("moment", ["read current_step", "write current_step", "read _stop_at"])
def test_a_training_that_is_delayed_anywhere_sees_the_gate_or_is_detected(moment: str) -> None:
    gate = HookedGate()
    armed: list[bool] = []

    def watch() -> None:
        armed.append(gate.arm(1))
        if armed[0]:
            gate.grant(1, SAVE)

    gate.hooks[moment] = watch
    assert gate.step() == (SAVE if armed[0] else NO_ACTIONS)
    assert len(armed) == 1


class Training:
    """A thread that makes one step and keeps the result or the error."""

    def __init__(self, gate: StepGate) -> None:
        self.gate = gate
        self.got: Any = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.got = self.gate.step()
        except RankFailed as e:
            self.got = e

    def wait_until_blocked(self) -> None:
        self.thread.start()
        while not self.gate._changed._waiters and self.thread.is_alive():  # type: ignore[attr-defined]
            pass
        assert self.thread.is_alive()

    def join(self) -> Any:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.got


def fail_gate(gate: StepGate) -> None:
    gate.fail(RankFailed("the store is gone"))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (StepGate.disarm, NO_ACTIONS),
        (StepGate.disable, NO_ACTIONS),
        (lambda gate: gate.grant(3, SAVE), SAVE),
        (lambda gate: gate.arm(9), NO_ACTIONS),
        (lambda gate: gate.arm(3), NO_ACTIONS),  # refused: the training has reached this step
        (fail_gate, RankFailed),
    ],
)
def test_a_wait_at_a_gate_ends_with_the_expected_actions_or_error(
    end: Callable[[StepGate], object], expected: Any
) -> None:
    gate = StepGate(60.0)
    assert gate.arm(3)
    assert [gate.step(), gate.step()] == [NO_ACTIONS, NO_ACTIONS]
    training = Training(gate)
    training.wait_until_blocked()
    end(gate)
    got = training.join()
    assert isinstance(got, RankFailed) if expected is RankFailed else got == expected
    gate.disarm()
    assert [gate.step() for _ in range(10)] == [NO_ACTIONS] * 10


def test_step_raises_once_if_the_watcher_never_responds_and_the_training_continues() -> None:
    gate = StepGate(0.01)
    gate.arm(1)
    with pytest.raises(RankFailed, match="does not respond"):
        gate.step()
    assert [gate.step() for _ in range(10)] == [NO_ACTIONS] * 10


def test_actions_for_two_steps_are_delivered_at_their_steps() -> None:
    gate = StepGate(60.0)
    gate.arm(2)
    gate.grant(2, SAVE)
    gate.arm(4)
    gate.grant(4, frozenset({"stop"}))
    assert [gate.step() for _ in range(5)] == [NO_ACTIONS, SAVE, NO_ACTIONS, {"stop"}, NO_ACTIONS]
    assert gate.delivery_count == 2


def test_granted_actions_are_delivered_although_the_next_round_fails() -> None:
    gate = StepGate(60.0)
    gate.arm(1)
    gate.grant(1, SAVE)
    gate.arm(3)
    fail_gate(gate)
    assert [gate.step(), gate.step()] == [SAVE, NO_ACTIONS]
    with pytest.raises(RankFailed, match="the store is gone"):
        gate.step()
    assert gate.step() == NO_ACTIONS


def test_the_step_after_an_interrupted_wait_delivers_the_actions() -> None:
    gate = StepGate(60.0)
    gate.arm(1)

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    gate._changed.wait = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        gate.step()
    del gate._changed.wait
    gate.grant(1, SAVE)
    assert [gate.step(), gate.step()] == [SAVE, NO_ACTIONS]


def test_no_step_passes_an_armed_gate_when_two_threads_race() -> None:
    """The interpreter switches threads as often as possible. In each race, at least one thread
    must see the other."""
    gate = StepGate(60.0)
    got: list[tuple[int, frozenset[str]]] = []
    expected = []
    done = False

    def train() -> None:
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
