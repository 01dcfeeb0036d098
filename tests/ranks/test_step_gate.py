"""The step gate of one rank, under a race between training and watcher."""

import sys
import threading
import time

from limpet.ranks.step_gate import NEVER, StepGate

SAVE = frozenset({"save"})


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
