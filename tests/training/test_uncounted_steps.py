"""A training that ends normally, although its steps were never counted, and nothing was saved."""

import subprocess
import sys

import pytest
import torch

import limpet
from limpet.errors import LimpetError
from limpet.preemption import PreemptionGuard
from limpet.storage.memory import MemoryStore

LOST = r"nothing was saved in .* ckpt\.step\(\) was never called"


class Wrapper(torch.optim.Optimizer):
    """Has the groups of another optimizer, which steps, as those of Accelerate do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state, self.param_groups = optimizer.state, optimizer.param_groups
        self.defaults = optimizer.defaults

    def step(self, closure=None):
        return self.optimizer.step(closure)


def make_state(kind=torch.optim.SGD):
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    options = {} if kind is torch.optim.LBFGS else {"lr": 0.1}
    optimizer = kind(model.parameters(), **options)
    return {"model": model, "nested": {"optimizer": optimizer}, "progress": limpet.Progress()}


def step(state):
    state["nested"]["optimizer"].step(lambda: torch.zeros(()))


@pytest.fixture(params=[False, True], ids=["dict", "function"])
def start(request):
    """Returns a Checkpointer, and its state."""

    def start(store=None, kind=torch.optim.SGD, **options):
        state = make_state(kind)
        store = MemoryStore() if store is None else store
        given = (lambda: state) if request.param else state
        ckpt = limpet.Checkpointer(store, given, quiet=True, **options)
        return ckpt, state

    return start


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.parametrize("has_block", [False, True])
def test_a_training_without_a_step_of_the_checkpointer_ends_with_an_error(start, kind, has_block):
    ckpt, state = start(kind=kind)
    with pytest.raises(LimpetError, match=LOST):
        if has_block:
            with ckpt:
                ckpt.resume()
                step(state)
        else:
            ckpt.resume()
            step(state)
            ckpt.close()
    ckpt.close()  # it is closed
    with pytest.raises(LimpetError, match="closed"):
        ckpt.step()


def test_the_optimizer_of_a_wrapper_counts():
    state = make_state()
    inner = state["nested"]["optimizer"]
    state["nested"]["optimizer"] = Wrapper(inner)
    with pytest.raises(LimpetError, match=LOST), limpet.Checkpointer(MemoryStore(), state):
        inner.step()


def test_epochs_without_steps_are_no_steps():
    state = make_state()
    with pytest.raises(LimpetError, match=LOST), limpet.Checkpointer(MemoryStore(), state) as ckpt:
        for _ in ckpt.epochs(2):
            step(state)


def count(ckpt, state):
    step(state)
    ckpt.step()


def guard(ckpt, state):
    PreemptionGuard(ckpt).run(step, state)


def stepped_before(ckpt, state):
    step(state)
    ckpt.resume()


def other(ckpt, state):
    step(make_state())


WAYS = {
    "step": count,
    "guard": guard,
    "nothing": lambda ckpt, state: None,
    "steps before a resume": stepped_before,
    "another optimizer": other,
}


@pytest.mark.parametrize("use", WAYS.values(), ids=WAYS)
def test_other_ends_are_no_error(start, use):
    store = MemoryStore()
    ckpt, state = start(store)
    with ckpt:
        ckpt.resume()
        count(ckpt, state)
    ckpt, state = start(store)
    with ckpt:
        assert ckpt.resume().step == 1
        use(ckpt, state)
    step(state)  # it is no longer watched


def test_a_save_counts_if_it_saves(start):
    """A step that is already saved is not saved again."""
    store = MemoryStore()
    ckpt, state = start(store)
    with ckpt:
        step(state)
        ckpt.save()
    ckpt, state = start(store)
    with pytest.raises(LimpetError, match=LOST), ckpt:
        ckpt.resume()
        step(state)
        ckpt.save()


def test_never_and_finished_trainings_are_no_error(start):
    ckpt, state = start(save=limpet.Never())
    with ckpt:
        ckpt.resume()
        step(state)
    store = MemoryStore()
    for _ in range(2):
        ckpt, state = start(store)
        with ckpt:
            for _ in ckpt.epochs(1):
                count(ckpt, state)


@pytest.mark.parametrize("error", [ValueError("own"), SystemExit(3), KeyboardInterrupt()])
def test_the_exception_that_ends_a_training_is_not_replaced(start, error):
    ckpt, state = start()
    with pytest.raises(type(error)) as raised, ckpt:
        ckpt.resume()
        step(state)
        raise error
    assert raised.value is error


@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_the_process_does_not_exit_with_0(end, tmp_path):
    script = f"""
import sys, torch, limpet
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with limpet.Checkpointer("run", {{"model": model, "optimizer": optimizer}}) as ckpt:
    ckpt.resume()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    {end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "nothing was saved in run" in done.stderr
