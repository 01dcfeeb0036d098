"""What holds still between two steps of the optimizers, and the hook that ends it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.engine.state.flatten import flatten
from holdfast.engine.state.step_hooks import StepPreHook, find_stable_leaves
from holdfast.engine.state.walk import find_instances, modules_in, optimizers_in

SGD, Adam = torch.optim.SGD, torch.optim.Adam


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.fc(x))
        return made


def stepped(model: torch.nn.Module, make: Any = Adam, **options: Any) -> Any:
    optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def keys(state: dict[str, Any]) -> set[str]:
    return find_stable_leaves(state, flatten(state))


PARAMETERS = {"fc.weight", "fc.bias", "norm.weight", "norm.bias"}


def test_parameters_and_slots_and_nothing_else() -> None:
    model = Net()
    state = {
        "model": model,
        "optimizer": stepped(model),
        "rng": holdfast.RNG(),
        "plain": torch.zeros(3),
        "array": torch.zeros(3).numpy(),
    }
    assert keys(state) == {f"model/{n}" for n in PARAMETERS} | {
        f"optimizer/state/model.{n}/{slot}"
        for n in PARAMETERS
        for slot in ("step", "exp_avg", "exp_avg_sq")
    }


def test_what_no_optimizer_owns_may_change() -> None:
    model = Net()
    model.fc.requires_grad_(False)
    assert keys({"model": model}) == set()
    assert keys({"model": model, "o": [stepped(model, SGD, lr=0.1)]}) == {
        "model/norm.weight",
        "model/norm.bias",
    }


def test_an_optimizer_without_its_model_has_its_slots() -> None:
    found = keys({"o": stepped(Net(), SGD, lr=0.1, momentum=0.9)})
    assert found == {f"o/state/0.{i}/momentum_buffer" for i in range(4)}


def test_options_that_are_tensors_are_not_steady() -> None:
    """A scheduler changes the learning rate in place, outside of the step."""
    model = Net()
    state = {"m": model, "o": stepped(model, Adam, lr=torch.tensor(0.1), capturable=False)}
    assert "o/groups/0/lr" in {leaf.key for leaf in flatten(state).leaves}
    assert not [k for k in keys(state) if k.endswith("lr")]


def test_a_parameter_that_shares_its_storage_with_a_buffer_is_not_steady() -> None:
    model = Net()
    model.register_buffer("view", model.fc.weight.detach()[1:], persistent=False)
    found = keys({"m": model, "o": stepped(model, SGD, lr=0.1)})
    assert found == {"m/fc.bias", "m/norm.weight", "m/norm.bias"}


def test_a_slot_that_shares_its_storage_with_a_buffer_is_not_steady() -> None:
    model = Net()
    optimizer = stepped(model, SGD, lr=0.1, momentum=0.9)
    model.register_buffer("of", optimizer.state[model.fc.bias]["momentum_buffer"].view(1, 2))
    assert "o/state/m.fc.bias/momentum_buffer" not in keys({"m": model, "o": optimizer})
    assert "o/state/m.fc.weight/momentum_buffer" in keys({"m": model, "o": optimizer})


def test_views_of_one_flat_parameter_are_steady() -> None:
    flat = torch.nn.Parameter(torch.arange(6.0))
    state = {"a": flat.detach()[:2], "b": flat.detach()[2:], "o": SGD([flat], lr=0.1)}
    assert keys(state) == {"a", "b"}


def test_slots_in_lists_count() -> None:
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


def test_an_optimizer_with_a_state_dict_of_its_own_counts() -> None:
    class Own(SGD):
        def state_dict(self) -> Any:
            return super().state_dict()

    model = Net()
    found = keys({"m": model, "o": stepped(model, Own, lr=0.1, momentum=0.9)})
    assert sum(k.startswith("o/") for k in found) == 4
    assert sum(k.startswith("m/") for k in found) == 4


def test_what_has_no_bytes_or_no_storage() -> None:
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse())
    whole = torch.nn.Parameter(torch.ones(2))
    state = {"e": empty, "s": sparse, "w": whole, "o": SGD([empty, sparse, whole], lr=0.1)}
    assert keys(state) == {"w"}


def test_inference_tensors_are_not_steady() -> None:
    with torch.inference_mode():
        model = Net()
    state = {"m": model, "o": SGD(model.parameters(), lr=0.1)}
    assert keys(state) == set()


def test_optimizers_and_modules_are_found_once_wherever_they_are() -> None:
    model = Net()
    o = SGD(model.parameters(), lr=0.1)
    within: list[Any] = [o]
    within.append(within)
    state = {"a": {"b": (o, [within])}, "m": model, "n": [model], "x": "text"}
    assert optimizers_in(state) == [o]
    assert modules_in(state) == [model]


def test_containers_within_themselves_are_walked_once() -> None:
    d: dict[str, Any] = {"o": 1.5}
    d["a"] = d["b"] = [d, (d, d)]
    deep: list[Any] = [2.5]
    for _ in range(60):
        deep = [deep, deep]
    assert list(find_instances([d, deep], float)) == [1.5, 2.5]
    assert list(find_instances([d], dict)) == [d]


class Made(dict[str, Any]):
    """Makes its members while they are read."""

    def values(self) -> Any:
        return ((float(i),) for i in range(200))


def test_members_that_are_made_while_they_are_read_are_all_looked_into() -> None:
    assert len(list(find_instances(Made(), float))) == 200


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_weights_that_a_forward_pass_changes_are_not_steady(layer: Any) -> None:
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
def test_the_hook_comes_before_the_change(
    make: Callable[..., torch.optim.Optimizer], backend: str | None
) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    optimizer = make([p])
    seen: list[torch.Tensor] = []
    guard = StepPreHook([optimizer], lambda: seen.append(p.detach().clone()))
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
    guard.remove()
    guard.remove()
    step()
    assert len(seen) == 3
    assert not optimizer._optimizer_step_pre_hooks
    guard = StepPreHook(
        None, lambda: seen.append(p.detach().clone())
    )  # noticed by what is compiled
    step()
    assert len(seen) == 4
    guard.remove()


def test_the_hook_comes_before_the_closure() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([p])
    seen: list[str] = []
    guard = StepPreHook([optimizer], lambda: seen.append("hook"))

    def closure() -> Any:
        seen.append("closure")
        return _closure(optimizer, p)

    optimizer.step(closure)
    assert seen[:2] == ["hook", "closure"]
    guard.remove()


def test_a_step_of_a_subclass_and_through_wrappers() -> None:
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = Own([p], lr=1)
    seen: list[float] = []
    guard = StepPreHook([optimizer], lambda: seen.append(p.item()))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert set(seen) == {1.0}
    guard.remove()


def test_an_exception_keeps_the_step_from_happening() -> None:
    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = SGD([p], lr=1)

    def refuse() -> None:
        raise ZeroDivisionError

    guard = StepPreHook([optimizer], refuse)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert p.item() == 1
    guard.remove()
    optimizer.step()
    assert p.item() == 0


def stepping(*parameters: torch.nn.Parameter) -> Callable[[], object]:
    """The step of another optimizer, over these parameters."""
    for p in parameters:
        p.grad = torch.ones_like(p)
    return SGD(parameters, lr=1).step


def test_only_who_owns_a_parameter_of_the_optimizers_is_told() -> None:
    p, q, z = (torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 0))
    optimizer = SGD([p, z], lr=1)
    seen: list[str] = []
    some = StepPreHook([optimizer], lambda: seen.append("some"))
    every = StepPreHook(None, lambda: seen.append("every"))
    none = StepPreHook((), lambda: seen.append("none"))
    for step, told in [
        (optimizer.step, {"some", "every"}),
        (stepping(p), {"some", "every"}),
        (stepping(q, p), {"some", "every"}),
        (stepping(torch.nn.Parameter(p.detach()[1:])), {"some", "every"}),
        (stepping(q), {"every"}),
        (stepping(torch.nn.Parameter(torch.ones(0))), {"every"}),  # no memory is no shared one
    ]:
        seen.clear()
        step()
        assert set(seen) == told
        assert len(seen) == len(told)
    for guard in (none, every):
        guard.remove()
    seen.clear()
    optimizer.step()
    assert seen == ["some"]
    some.remove()


def test_a_guard_that_is_forgotten_guards_no_more_and_holds_nothing() -> None:
    class Owner:
        def __init__(self) -> None:
            self.guard = StepPreHook(None, self.told)

        def told(self) -> None:
            seen.append("told")

    seen: list[str] = []
    owner: Any = Owner()
    step = stepping(torch.nn.Parameter(torch.ones(1)))
    step()
    del owner
    gc.collect()
    step()
    assert seen == ["told"]


def test_guards_come_and_go_while_another_thread_is_held_up() -> None:
    inside, go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go.wait(20)

    failed: list[BaseException] = []

    def step() -> None:
        try:
            stepping(torch.nn.Parameter(torch.ones(1)))()
        except BaseException as e:
            failed.append(e)

    guards = [StepPreHook(None, wait)]
    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(20)
    guards += [StepPreHook(None, int) for _ in range(10)]
    for guard in guards:
        guard.remove()
    go.set()
    thread.join(20)
    assert not failed
