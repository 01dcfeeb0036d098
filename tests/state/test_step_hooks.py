"""Leaves that are stable between two optimizer steps, and the hook before each step."""

import gc
import threading
from typing import Any

import pytest
import torch

from limpet.state.flatten import flatten
from limpet.state.step_hooks import StepPreHook
from limpet.state.walk import find_stable_leaves

SGD, Adam = torch.optim.SGD, torch.optim.Adam


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x):
        made: torch.Tensor = self.norm(self.fc(x))
        return made


def step_once(model, make=Adam, **options):
    optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def keys(state):
    return find_stable_leaves(state, flatten(state).leaves)


def test_options_that_are_tensors_are_not_stable():
    """A scheduler changes the learning rate in place, outside the optimizer step."""
    model = Net()
    state = {"m": model, "o": step_once(model, Adam, lr=torch.tensor(0.1), capturable=False)}
    assert "o/groups/0/lr" in {leaf.key for leaf in flatten(state).leaves}
    assert not [k for k in keys(state) if k.endswith("lr")]


def test_a_parameter_that_shares_its_storage_with_a_buffer_is_not_stable():
    model = Net()
    model.register_buffer("view", model.fc.weight.detach()[1:], persistent=False)
    found = keys({"m": model, "o": step_once(model, SGD, lr=0.1)})
    assert found == {"m/fc.bias", "m/norm.weight", "m/norm.bias"}


def test_empty_and_sparse_parameters_are_not_stable():
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse())
    whole = torch.nn.Parameter(torch.ones(2))
    state = {"e": empty, "s": sparse, "w": whole, "o": SGD([empty, sparse, whole], lr=0.1)}
    assert keys(state) == {"w"}


def test_inference_tensors_are_not_stable():
    with torch.inference_mode():
        model = Net()
    state = {"m": model, "o": SGD(model.parameters(), lr=0.1)}
    assert keys(state) == set()


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_weights_that_a_forward_pass_changes_are_not_stable(layer):
    model = torch.nn.Sequential(layer(5, 2, max_norm=1.0), torch.nn.Linear(2, 2))
    assert keys({"m": model, "o": SGD(model.parameters(), lr=0.1)}) == {"m/1.weight", "m/1.bias"}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (lambda p: SGD(p, lr=0.1), None),
        (Adam, None),
        (lambda p: Adam(p, fused=True), None),
        (lambda p: Adam(p, foreach=True), None),
        pytest.param(Adam, "eager", marks=pytest.mark.slow),
    ],
    ids=["sgd", "adam", "fused", "foreach", "compiled"],
)
def test_the_hook_runs_before_the_step_changes_a_parameter(make, backend):
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    optimizer = make([p])
    seen: list[torch.Tensor] = []
    hook = StepPreHook([optimizer], lambda: seen.append(p.detach().clone()))
    step: Any = optimizer.step
    if backend is not None:
        torch._dynamo.reset()
        step = torch.compile(step, backend=backend)
    before = [p.detach().clone()]
    for _ in range(3):
        step()
        before.append(p.detach().clone())
    assert [s.tolist() for s in seen] == [b.tolist() for b in before[:3]]
    assert not torch.equal(before[0], before[1])
    hook.remove()
    hook.remove()
    step()
    assert len(seen) == 3
    assert not optimizer._optimizer_step_pre_hooks
    # A hook that is added later also runs in a compiled step.
    hook = StepPreHook(None, lambda: seen.append(p.detach().clone()))
    step()
    assert len(seen) == 4
    hook.remove()


def test_the_hook_runs_for_a_subclass_and_through_a_wrapper():
    class Override(SGD):
        def step(self, closure=None):
            return super().step(closure)

    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = Override([p], lr=1)
    seen: list[float] = []
    hook = StepPreHook([optimizer], lambda: seen.append(p.item()))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert set(seen) == {1.0}
    hook.remove()


def other_step(*parameters):
    """Return the ``step`` of a new optimizer of these parameters."""
    for p in parameters:
        p.grad = torch.ones_like(p)
    return SGD(parameters, lr=1).step


def test_the_hook_runs_only_for_steps_that_change_memory_of_its_optimizers():
    p, q, z = (torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 0))
    optimizer = SGD([p, z], lr=1)
    seen: list[str] = []
    some = StepPreHook([optimizer], lambda: seen.append("some"))
    every = StepPreHook(None, lambda: seen.append("every"))
    none = StepPreHook((), lambda: seen.append("none"))
    for step, expected in [
        (optimizer.step, {"some", "every"}),
        (other_step(p), {"some", "every"}),
        (other_step(q, p), {"some", "every"}),
        (other_step(torch.nn.Parameter(p.detach()[1:])), {"some", "every"}),
        (other_step(q), {"every"}),
        # A parameter without memory shares none.
        (other_step(torch.nn.Parameter(torch.ones(0))), {"every"}),
    ]:
        seen.clear()
        step()
        assert set(seen) == expected
        assert len(seen) == len(expected)
    for hook in (none, every):
        hook.remove()
    seen.clear()
    optimizer.step()
    assert seen == ["some"]
    some.remove()


def test_a_hook_of_a_collected_owner_no_longer_runs():
    class Owner:
        def __init__(self):
            self.hook = StepPreHook(None, self.on_step)

        def on_step(self):
            seen.append("step")

    seen: list[str] = []
    owner: Any = Owner()
    step = other_step(torch.nn.Parameter(torch.ones(1)))
    step()
    del owner
    gc.collect()
    step()
    assert seen == ["step"]


def test_hooks_can_be_added_and_removed_while_another_thread_is_in_one():
    inside, go = threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert go.wait(20)

    failed: list[BaseException] = []

    def step():
        try:
            other_step(torch.nn.Parameter(torch.ones(1)))()
        except BaseException as e:
            failed.append(e)

    hooks = [StepPreHook(None, wait)]
    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(20)
    hooks += [StepPreHook(None, int) for _ in range(10)]
    for hook in hooks:
        hook.remove()
    go.set()
    thread.join(20)
    assert not failed
