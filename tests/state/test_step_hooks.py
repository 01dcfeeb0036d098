"""Leaves that are stable between two optimizer steps, and the hook before each step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import limpet
from limpet.state.flatten import flatten
from limpet.state.step_hooks import StepPreHook, find_stable_leaves
from limpet.state.walk import find_instances, modules_in, optimizers_in

SGD, Adam = torch.optim.SGD, torch.optim.Adam


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.fc(x))
        return made


def step_once(model: torch.nn.Module, make: Any = Adam, **options: Any) -> Any:
    optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def keys(state: dict[str, Any]) -> set[str]:
    return find_stable_leaves(state, flatten(state))


PARAMETERS = {"fc.weight", "fc.bias", "norm.weight", "norm.bias"}


def test_only_parameters_and_slots_are_stable() -> None:
    model = Net()
    state = {
        "model": model,
        "optimizer": step_once(model),
        "rng": limpet.RNG(),
        "plain": torch.zeros(3),
        "array": torch.zeros(3).numpy(),
    }
    assert keys(state) == {f"model/{n}" for n in PARAMETERS} | {
        f"optimizer/state/model.{n}/{slot}"
        for n in PARAMETERS
        for slot in ("step", "exp_avg", "exp_avg_sq")
    }


def test_parameters_without_an_optimizer_are_not_stable() -> None:
    model = Net()
    model.fc.requires_grad_(False)
    assert keys({"model": model}) == set()
    assert keys({"model": model, "o": [step_once(model, SGD, lr=0.1)]}) == {
        "model/norm.weight",
        "model/norm.bias",
    }


def test_slots_are_stable_without_the_model_in_the_state() -> None:
    found = keys({"o": step_once(Net(), SGD, lr=0.1, momentum=0.9)})
    assert found == {f"o/state/0.{i}/momentum_buffer" for i in range(4)}


def test_options_that_are_tensors_are_not_stable() -> None:
    """A scheduler changes the learning rate in place, outside the optimizer step."""
    model = Net()
    state = {"m": model, "o": step_once(model, Adam, lr=torch.tensor(0.1), capturable=False)}
    assert "o/groups/0/lr" in {leaf.key for leaf in flatten(state).leaves}
    assert not [k for k in keys(state) if k.endswith("lr")]


def test_a_parameter_that_shares_its_storage_with_a_buffer_is_not_stable() -> None:
    model = Net()
    model.register_buffer("view", model.fc.weight.detach()[1:], persistent=False)
    found = keys({"m": model, "o": step_once(model, SGD, lr=0.1)})
    assert found == {"m/fc.bias", "m/norm.weight", "m/norm.bias"}


def test_a_slot_that_shares_its_storage_with_a_buffer_is_not_stable() -> None:
    model = Net()
    optimizer = step_once(model, SGD, lr=0.1, momentum=0.9)
    model.register_buffer("of", optimizer.state[model.fc.bias]["momentum_buffer"].view(1, 2))
    assert "o/state/m.fc.bias/momentum_buffer" not in keys({"m": model, "o": optimizer})
    assert "o/state/m.fc.weight/momentum_buffer" in keys({"m": model, "o": optimizer})


def test_views_of_one_flat_parameter_are_stable() -> None:
    flat = torch.nn.Parameter(torch.arange(6.0))
    state = {"a": flat.detach()[:2], "b": flat.detach()[2:], "o": SGD([flat], lr=0.1)}
    assert keys(state) == {"a", "b"}


def test_slots_in_lists_are_stable() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    o = torch.optim.LBFGS([p], history_size=3)
    for _ in range(3):
        o.step(lambda: _closure(o, p))
    assert any("/old_dirs/" in k for k in keys({"p": p, "o": o}))


def _closure(o: Any, p: torch.Tensor) -> Any:
    o.zero_grad()
    loss = (p**4).sum()
    loss.backward()
    return loss


def test_slots_of_an_optimizer_that_overrides_state_dict_are_stable() -> None:
    class Override(SGD):
        def state_dict(self) -> Any:
            return super().state_dict()

    model = Net()
    found = keys({"m": model, "o": step_once(model, Override, lr=0.1, momentum=0.9)})
    assert sum(k.startswith("o/") for k in found) == 4
    assert sum(k.startswith("m/") for k in found) == 4


def test_empty_and_sparse_parameters_are_not_stable() -> None:
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse())
    whole = torch.nn.Parameter(torch.ones(2))
    state = {"e": empty, "s": sparse, "w": whole, "o": SGD([empty, sparse, whole], lr=0.1)}
    assert keys(state) == {"w"}


def test_inference_tensors_are_not_stable() -> None:
    with torch.inference_mode():
        model = Net()
    state = {"m": model, "o": SGD(model.parameters(), lr=0.1)}
    assert keys(state) == set()


def test_optimizers_and_modules_are_found_once_at_any_place() -> None:
    model = Net()
    o = SGD(model.parameters(), lr=0.1)
    within: list[Any] = [o]
    within.append(within)
    state = {"a": {"b": (o, [within])}, "m": model, "n": [model], "x": "text"}
    assert optimizers_in(state) == [o]
    assert modules_in(state) == [model]


def test_containers_that_contain_themselves_are_traversed_once() -> None:
    d: dict[str, Any] = {"o": 1.5}
    d["a"] = d["b"] = [d, (d, d)]
    deep: list[Any] = [2.5]
    for _ in range(60):
        deep = [deep, deep]
    assert list(find_instances([d, deep], float)) == [1.5, 2.5]
    assert list(find_instances([d], dict)) == [d]


class LazyDict(dict[str, Any]):
    """A dict that creates its values while they are read."""

    def values(self) -> Any:
        return ((float(i),) for i in range(200))


def test_values_that_are_created_while_they_are_read_are_all_traversed() -> None:
    assert len(list(find_instances(LazyDict(), float))) == 200


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_weights_that_a_forward_pass_changes_are_not_stable(layer: Any) -> None:
    model = torch.nn.Sequential(layer(5, 2, max_norm=1.0), torch.nn.Linear(2, 2))
    assert keys({"m": model, "o": SGD(model.parameters(), lr=0.1)}) == {"m/1.weight", "m/1.bias"}


# -- the hook ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        Adam,
        lambda p: Adam(p, fused=True),
        lambda p: Adam(p, foreach=True),
    ],
    ids=["sgd", "adam", "fused", "foreach"],
)
def test_the_hook_runs_before_the_step_changes_a_parameter(
    make: Callable[..., torch.optim.Optimizer], backend: str | None
) -> None:
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


def test_the_hook_runs_before_the_closure() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([p])
    seen: list[str] = []
    hook = StepPreHook([optimizer], lambda: seen.append("hook"))

    def closure() -> Any:
        seen.append("closure")
        return _closure(optimizer, p)

    optimizer.step(closure)
    assert seen[:2] == ["hook", "closure"]
    hook.remove()


def test_the_hook_runs_for_a_subclass_and_through_a_wrapper() -> None:
    class Override(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = Override([p], lr=1)
    seen: list[float] = []
    hook = StepPreHook([optimizer], lambda: seen.append(p.item()))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert set(seen) == {1.0}
    hook.remove()


def test_an_exception_in_the_hook_prevents_the_step() -> None:
    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = SGD([p], lr=1)

    def refuse() -> None:
        raise ZeroDivisionError

    hook = StepPreHook([optimizer], refuse)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert p.item() == 1
    hook.remove()
    optimizer.step()
    assert p.item() == 0


def other_step(*parameters: torch.nn.Parameter) -> Callable[[], object]:
    """Return the ``step`` of a new optimizer of these parameters."""
    for p in parameters:
        p.grad = torch.ones_like(p)
    return SGD(parameters, lr=1).step


def test_the_hook_runs_only_for_steps_that_change_memory_of_its_optimizers() -> None:
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


def test_a_hook_of_a_collected_owner_no_longer_runs() -> None:
    class Owner:
        def __init__(self) -> None:
            self.hook = StepPreHook(None, self.on_step)

        def on_step(self) -> None:
            seen.append("step")

    seen: list[str] = []
    owner: Any = Owner()
    step = other_step(torch.nn.Parameter(torch.ones(1)))
    step()
    del owner
    gc.collect()
    step()
    assert seen == ["step"]


def test_hooks_can_be_added_and_removed_while_another_thread_is_in_one() -> None:
    inside, go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go.wait(20)

    failed: list[BaseException] = []

    def step() -> None:
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
