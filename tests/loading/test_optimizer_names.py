"""The slots of every kind of optimizer are found by the names of their parameters: the restarted
program has the parameters in another order. What belongs to no parameter is restored as well."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import DTypeMismatch, PlanError
from tests.states import assert_same, save_state, unused_url

NAMES = ["a", "b", "c"]
Adam = partial(optim.Adam, lr=0.01)


class Hooked(optim.Adam):
    def __init__(self, params):
        super().__init__(params, 0.01)
        self.loads = 0
        self.register_state_dict_post_hook(lambda o, state: {**state, "hooked": 7})
        self.register_load_state_dict_post_hook(lambda o: setattr(o, "loads", o.loads + 1))


class OwnState(optim.Adam):
    def state_dict(self):
        return {"inner": [super().state_dict()], "extra": torch.ones(2)}

    def load_state_dict(self, state):
        assert torch.equal(state["extra"], torch.ones(2))
        super().load_state_dict(state["inner"][0])


class Wrapper(optim.Optimizer):
    """As of Accelerate and Fabric."""

    def __init__(self, params):
        self.optimizer = Adam(params)

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self, closure=None):
        self.optimizer.step(closure)


class NoOptimizer:
    """As ``schedulefree.ScheduleFreeWrapper``."""

    def __init__(self, params):
        self.base = Adam(params)

    state = property(lambda self: self.base.state)
    param_groups = property(lambda self: self.base.param_groups)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)

    def step(self):
        self.base.step()


class NoCode(optim.Optimizer):
    """As SAM: its slots, and an inner optimizer with the same groups."""

    def __init__(self, params):
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = Adam(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.detach().clone()
        self.base_optimizer.step()


class TwoSteps(NoCode):
    def state_dict(self):
        return {**super().state_dict(), "base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict({k: v for k, v in state.items() if k != "base"})
        self.base_optimizer.load_state_dict(state["base"])
        self.param_groups = self.base_optimizer.param_groups


class WithoutInner(TwoSteps):
    """As SAM really is: its ``state_dict()`` lacks the inner optimizer."""

    state_dict = optim.Optimizer.state_dict

    def load_state_dict(self, state):
        optim.Optimizer.load_state_dict(self, state)
        self.base_optimizer.param_groups = self.param_groups


class Counting(optim.SGD):
    """As MADGRAD and others: state by text, of a class, and that is no dict of slots."""

    def step(self, closure=None):
        count = self.state.get("k", torch.tensor([0]))
        self.state["k"] = count + 1
        self.state["history"] = [*self.state.get("history", []), int(count)]
        self.param_groups[0]["added"] = 0.5 * float(count)
        self.state[3] = {"mean": torch.full((2, 2), float(count))}
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i == 0:
                self.state[p] = p.detach() * float(count)
            else:
                self.state[p].setdefault("nested", {"m": [p.detach().clone()]})["m"][0].add_(p)


class Named(optim.Adam):
    def __init__(self, params):
        super().__init__([(name, p) for name, p in zip(NAMES * 9, params, strict=False)], 0.01)


KINDS = [Adam, Hooked, OwnState, Wrapper, NoOptimizer, NoCode, TwoSteps, WithoutInner, Counting]


class Net(nn.Module):
    def __init__(self, order):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(3, 3, bias=False))

    def tensors(self):
        return {name: getattr(self, name).weight for name in NAMES}


class Agent:
    """An object that saves its module, without being one."""

    def __init__(self, net):
        self.net = net

    def state_dict(self):
        return {"net": self.net.state_dict(), "n": 1}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])


HOLDERS = {
    "module": lambda net: net,
    "state dict": lambda net: dict(net.state_dict()),
    "parameters": lambda net: [{n: net.tensors()[n]} for n in NAMES],
    "object": Agent,
    "per rank": lambda net: limpet.PerRank({"net": net}),
    "boxed": lambda net: {n: limpet.Boxed(p, (0, 0), (3, 3)) for n, p in net.tensors().items()},
}


def make(kind, holder, order):
    net = Net(order)
    optimizer = kind(list(net.parameters()))
    return net, {"optimizer": optimizer, "holder": HOLDERS[holder](net)}


def train(net, state, *steps):
    for i in steps:
        torch.manual_seed(i)
        for p in net.tensors().values():
            p.grad = torch.randn(3, 3)
        state["optimizer"].step()


def contents(net, optimizer):
    """Return the state by the names of the parameters, and of inner optimizers."""
    names = {id(p): name for name, p in net.tensors().items()}
    found = {names.get(id(k), k): v for k, v in optimizer.state.items()}
    own = {name: found[name] for name in sorted(found, key=str)}
    inner = getattr(optimizer, "base_optimizer", None)
    return own if inner is None else {"own": own, "inner": contents(net, inner)}


@pytest.mark.parametrize("before", [(), (9,)], ids=["new", "stepped"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_follow_their_parameters_into_another_order(kind, holder, before):
    net, state = make(kind, holder, NAMES)
    train(net, state, 1, 2)
    live_net, live = make(kind, holder, ["c", "a", "b"])
    train(live_net, live, *before)
    limpet.load(save_state(state), into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))
    assert getattr(live["optimizer"], "loads", 1) == 1
    if kind is Counting:
        assert live["optimizer"].param_groups[0]["added"] == 0.5
        return  # its step depends on the order of the parameters
    for each in ((net, state), (live_net, live)):
        train(*each, 3, 4)
    for name, p in net.tensors().items():
        assert_same(p.detach(), live_net.tensors()[name].detach())


@pytest.mark.parametrize("kinds", [(Wrapper, Adam), (Adam, Wrapper), (Adam, NoOptimizer)])
def test_a_wrapper_and_its_optimizer_load_each_others_states(kinds):
    (net, state), (live_net, live) = (
        make(k, "module", order) for k, order in zip(kinds, (NAMES, "cba"), strict=True)
    )
    train(net, state, 1, 2)
    limpet.load(save_state(state), into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_torch_is_imported_and_an_export_is_loaded_by_torch(kind, tmp_path):
    """Both have numbers, so the order is the same."""
    net, state = make(kind, "module", NAMES)
    train(net, state, 1, 2)
    url = save_state(state)
    limpet.export(url, tmp_path / "a.pt", to="torch", root="optimizer")
    exported = torch.load(tmp_path / "a.pt")
    torch.save({"optimizer": state["optimizer"].state_dict()}, tmp_path / "b.pt")
    limpet.import_checkpoint(tmp_path / "b.pt", tmp_path / "b")
    for load in (
        lambda live: live["optimizer"].load_state_dict(exported),
        lambda live: limpet.load(tmp_path / "b", into=live, keys="optimizer/**"),
        lambda live: limpet.load(url, into=live, keys="optimizer/**"),
    ):
        live_net, live = make(kind, "module", NAMES)
        load(live)
        saved, loaded = (contents(n, s["optimizer"]) for n, s in ((net, state), (live_net, live)))
        if kind in (NoCode, WithoutInner):  # torch does not save the inner one
            saved, loaded = saved["own"], loaded["own"]
        assert_same(saved, loaded)


def test_parameters_of_named_parameters_need_no_module():
    net, state = make(Named, "module", NAMES)
    train(net, state, 1)
    url = save_state({"optimizer": state["optimizer"]})
    assert "optimizer/state/b/exp_avg" in limpet.open(url)
    live_net = Net(NAMES)
    tensors = list(live_net.tensors().items())
    live = {"optimizer": optim.Adam(tensors[::-1])}
    limpet.load(url, into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))


@pytest.mark.parametrize("kind", [Adam, Hooked, Wrapper, NoOptimizer])
def test_parameters_without_names_are_refused_if_they_could_be_mixed_up(kind):
    net = Net(NAMES)
    optimizer = kind([*net.parameters()])
    limpet.save(unused_url(), {"optimizer": optimizer})  # there is nothing to mix up
    train(net, {"optimizer": optimizer}, 1)
    for state in ({"optimizer": optimizer}, {"optimizer": optimizer, "other": Net("abc")}):
        with pytest.raises(PlanError, match=r"3 parameters of shape \[3, 3\] .*named_parameters"):
            limpet.save(unused_url(), state)
    distinct = [nn.Parameter(torch.ones(n)) for n in (2, 3)]
    limpet.save(unused_url(), {"optimizer": kind(distinct), "model": net})


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_only_one_side_has_are_listed(kind):
    net, state = make(kind, "module", NAMES)
    train(net, state, 1)
    url = save_state(state)

    class Smaller(Net):
        def tensors(self):
            return {name: p for name, p in super().tensors().items() if name != "b"}

    NAMES.remove("b")
    try:
        live_net = Smaller(NAMES)
    finally:
        NAMES.insert(1, "b")
    live_net.extra = nn.Linear(3, 3, bias=False)
    live = {"holder": live_net, "optimizer": kind([*live_net.parameters()])}
    before = contents(net, live["optimizer"])
    with pytest.raises(PlanError) as e:
        limpet.load(url, into=live)
    assert "params/holder.b.weight" in str(e.value)
    assert "params/holder.extra.weight" in str(e.value)
    assert_same(before, contents(net, live["optimizer"]))


@pytest.mark.parametrize("kind", [Adam, Hooked, Wrapper, OwnState])
def test_slots_are_found_by_renamed_parameters(kind):
    net, state = make(kind, "module", NAMES)
    train(net, state, 1)
    live_net, live = make(kind, "module", "cab")
    live = {"optimizer": live["optimizer"], "new": live["holder"]}
    limpet.load(save_state(state), into=live, rename={"holder": "new"})
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))


@pytest.mark.parametrize("kind", [Adam, Hooked, Wrapper, OwnState])
def test_tied_and_frozen_parameters_and_several_groups(kind):
    def build(order):
        net = Net(order)
        net.d = nn.Linear(3, 3, bias=False)
        net.d.weight = net.a.weight
        net.c.weight.requires_grad_(False)
        groups = [
            {"params": [p for n, p in net.named_parameters() if n[0] in g]} for g in ("ab", "c")
        ]
        return net, {"optimizer": kind(groups), "net": net}

    (net, state), (live_net, live) = build(NAMES), build("bca")
    for name in "ab":
        getattr(net, name).weight.grad = torch.randn(3, 3)
    state["optimizer"].step()
    url = save_state(state)
    limpet.load(url, into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))
    live["optimizer"].param_groups.reverse()
    with pytest.raises(PlanError, match=r"0/params/net\.c\.weight"):
        limpet.load(url, into=live)


def test_the_order_of_the_parameters_of_lbfgs_matters():
    """Its slots are vectors of all parameters."""

    def lbfgs(params):
        return optim.LBFGS(params, 0.1, max_iter=2, history_size=2)

    (net, state), (live_net, live) = (make(lbfgs, "module", order) for order in (NAMES, "cba"))
    state["optimizer"].step(lambda: sum(p.square().sum() for p in net.parameters()))
    url = save_state(state)
    with pytest.raises(DTypeMismatch, match=r"L-BFGS"):
        limpet.load(url, into=live)
    live_net, live = make(lbfgs, "module", NAMES)
    limpet.load(url, into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_savepoint_has_the_names(kind, tmp_path):
    net, state = make(kind, "module", NAMES)
    options = {"save": limpet.EverySteps(100) | limpet.OnException(), "quiet": True}

    def run():
        with limpet.Checkpointer(tmp_path, state, **options) as ckpt:
            for i in (1, 2):
                train(net, state, i)
                ckpt.step()
            raise RuntimeError("x")

    with pytest.raises(RuntimeError, match="x"):
        run()
    live_net, live = make(kind, "module", "bca")
    limpet.load(f"{tmp_path}@2", into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))


def schedule_free(params):
    made = pytest.importorskip("schedulefree").ScheduleFreeWrapper(optim.SGD(params, 0.1, 0.9))
    made.eval()
    return made


def of_lightning(params):
    pytest.importorskip("lightning")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    made = LightningOptimizer(Adam(params))
    made.step = made.optimizer.step
    return made


def of_fabric(params):
    fabric = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup_optimizers(Adam(params))


def of_accelerate(params):
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare_optimizer(Adam(params))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [schedule_free, of_lightning, of_fabric, of_accelerate])
def test_the_wrappers_of_other_libraries(wrap):
    (net, state), (live_net, live) = (make(wrap, "module", order) for order in (NAMES, "cba"))
    if wrap is schedule_free:
        state["optimizer"].train()
    train(net, state, 1, 2)
    if wrap is schedule_free:
        state["optimizer"].eval()
    limpet.load(save_state(state), into=live)
    assert_same(contents(net, state["optimizer"]), contents(live_net, live["optimizer"]))
    assert contents(net, state["optimizer"])["a"]
