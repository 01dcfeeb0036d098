"""Modules, optimizers, schedulers, and stateful objects: they are saved, loaded in place, and used
to continue training."""

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import limpet
from limpet.errors import (
    DTypeMismatch,
    PlanError,
    ShapeMismatch,
    UnexpectedLeaf,
)
from limpet.loading.snapshot import reader_of
from tests.states import Stateful, assert_same, round_trip, save_state, unused_url


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 2)))


def randomize(module):
    """Run some forward passes, change all parameters, and return the module."""
    module.train()
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(5, 4))
        for p in module.parameters():
            p.add_(torch.randn_like(p))
    return module


def assert_same_state_dict(a, b):
    assert_same(dict(a.state_dict()), dict(b.state_dict()))


def save_and_load(saved_module, live, key="model"):
    limpet.load(save_state({key: saved_module}), into={key: live})


def test_a_module_is_filled_in_place():
    m, live = randomize(net()), net(1)
    addresses = {k: v.data_ptr() for k, v in live.state_dict().items()}
    objects = [id(p) for p in live.parameters()]
    save_and_load(m, live)
    assert_same_state_dict(m, live)
    assert live[1].num_batches_tracked.item() == 3
    assert {k: v.data_ptr() for k, v in live.state_dict().items()} == addresses
    assert [id(p) for p in live.parameters()] == objects
    assert all(p.requires_grad for p in live.parameters())


def test_a_plain_load_returns_the_state_dict_of_a_module():
    m = randomize(net())
    made = round_trip({"model": m})["model"]
    assert_same(dict(m.state_dict()), dict(made))
    versions = m.state_dict()._metadata
    assert made._metadata == {path: versions[path] for path in ("", "0", "1", "2.0")}
    live = net(1)
    live.load_state_dict(made)
    assert_same_state_dict(m, live)


def test_a_state_dict_keeps_its_metadata_and_is_loaded_into_a_module():
    m = randomize(net())
    url = save_state({"model": m.state_dict()})
    made = limpet.load(url)["model"]
    assert_same(m.state_dict(), made)
    assert made._metadata == m.state_dict()._metadata
    assert limpet.load(url, keys="**")["model"]._metadata == made._metadata
    live = net(1)
    limpet.load(url, into={"model": live})
    assert_same_state_dict(m, live)
    other = net(2)
    live = {"model": other.state_dict()}
    limpet.load(url, into=live)
    assert_same_state_dict(m, other)


def test_non_persistent_buffers_are_neither_saved_nor_loaded():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(3))
            self.register_buffer("cache", torch.zeros(3), persistent=False)
            self.register_buffer("none", None)

    m, live = Net(), Net()
    m.kept += 1
    m.cache += 1
    assert set(round_trip({"m": m})["m"]) == {"kept"}
    save_and_load(m, live)
    assert live.kept.tolist() == [1, 1, 1]
    assert live.cache.tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_buffer_gets_the_saved_number_of_elements(layout, before):
    def make(values):
        m = nn.Linear(1, 1)
        dense = torch.tensor(values).view(2, 4)
        sizes = ((1, 2),) if layout.startswith("bs") else ()
        m.register_buffer("graph", getattr(dense, f"to_sparse_{layout}", dense.to_sparse)(*sizes))
        return nn.Sequential(m)

    m, live = make([0.0, 2, 3, 0, 0, -0.0, 7, 0]), make([5.0] * before + [0.0] * (8 - before))
    graph = live[0].graph
    save_and_load(m, live)
    assert_same_state_dict(m, live)
    assert live[0].graph is graph
    limpet.load(save_state({"model": m}), into={"model": live}, keys="model/0.weight")
    live[0].graph = torch.eye(3).to_sparse_csr()
    with pytest.raises(limpet.errors.MemberFailed, match="graph"):
        save_and_load(m, live)


class Extra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


@pytest.mark.parametrize(
    ("value", "before"),
    [
        ({"t": torch.ones(3), "n": [1, (2, None)]}, {}),
        # Transformer Engine saves bytes, whose length may change.
        (torch.arange(5), torch.empty(0)),
        (torch.empty(0), torch.arange(5)),
        (torch.ones(2), torch.zeros(2)),
        (b"x" * 10_000, None),
        ("text", 5),
    ],
    ids=lambda v: type(v).__name__,
)
def test_extra_state_is_restored(value, before):
    m, live = nn.Sequential(Extra(value)), nn.Sequential(Extra(before))
    save_and_load(m, live)
    assert_same(value, live[0].value)


def test_the_error_for_extra_state_that_cannot_be_saved_names_its_key():
    with pytest.raises(limpet.errors.Unsupported, match=r"'model/0\._extra_state/f'"):
        limpet.save(unused_url(), {"model": nn.Sequential(Extra({"f": len}))})


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    return Tied()


def test_tied_weights_are_written_once_and_stay_tied():
    m, live = tied(), tied()
    url = save_state({"model": m})
    assert list(reader_of(limpet.open(url)).leaves) == ["model/embed.weight"]
    limpet.load(url, into={"model": live})
    assert live.head.weight is live.embed.weight
    assert_same_state_dict(m, live)
    made = limpet.load(url)["model"]
    assert made["head.weight"] is made["embed.weight"]


def test_tied_weights_are_loaded_into_an_untied_model_but_not_the_reverse():
    m, apart = tied(), tied()
    apart.head.weight = nn.Parameter(torch.zeros(10, 4))
    save_and_load(m, apart)
    assert_same_state_dict(m, apart)
    assert apart.head.weight is not apart.embed.weight
    apart.head.weight.data += 1
    with pytest.raises(PlanError, match="share memory, but would get different"):
        save_and_load(apart, tied())


def test_a_module_under_two_keys_is_saved_once():
    m, live = net(), net(1)
    url = save_state({"a": m, "b": [m]})
    assert all(k.startswith("a/") for k in reader_of(limpet.open(url)).leaves)
    limpet.load(url, into={"a": live, "b": [live]})
    assert_same_state_dict(m, live)


@pytest.mark.parametrize("which", ["clone", "rename", "cast", "drop"])
def test_hooks_on_state_dict_and_load_state_dict_are_called(which):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.loads = 0

    def out(module, state, prefix, metadata):
        name = prefix + "w"
        if which == "clone":
            state[name] = state[name].clone()
        elif which == "rename":
            state[prefix + "weight"] = state.pop(name)
        elif which == "cast":
            state[name] = state[name].double()
        else:
            del state[name]

    def into(module, state, prefix, *_):
        module.loads += 1
        if which == "rename":
            state[prefix + "w"] = state.pop(prefix + "weight")
        elif which == "drop":
            state[prefix + "w"] = module.w.detach()

    def make():
        m = Hooked()
        m.register_state_dict_post_hook(out)
        m.register_load_state_dict_pre_hook(into)
        return m

    m, live = make(), make()
    before = live.w.detach().clone()
    url = save_state({"model": m})
    assert (
        limpet.open(url).keys()
        == {"clone": ["model/w"], "rename": ["model/weight"], "cast": ["model/w"], "drop": []}[
            which
        ]
    )
    limpet.load(url, into={"model": live})
    assert_same((before if which == "drop" else m.w).detach(), live.w.detach())
    assert live.loads == 1


def test_a_shape_that_a_hook_changes_is_checked_before_anything_is_changed():
    def make(n):
        m = nn.Linear(n, 1, bias=False)
        m.register_state_dict_post_hook(
            lambda _, s, p, __: s.update({p + "weight": s[p + "weight"] * 2})
        )
        return m

    live = {"first": torch.zeros(2), "m": make(3)}
    with pytest.raises(ShapeMismatch, match=r"m/weight \[1, 2\], live \[1, 3\]"):
        limpet.load(save_state({"first": torch.ones(2), "m": make(2)}), into=live)
    assert live["first"].tolist() == [0, 0]


@pytest.mark.parametrize("channels_last", [True, False])
def test_modules_are_loaded_across_memory_formats(channels_last):
    m, live = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    if channels_last:
        m, live = live, m
    save_and_load(m, live)
    assert_same_state_dict(m, live)


class Inner(nn.Module):
    """A module with a submodule named ``module``, which is the name that wrappers use."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.module(x))


def wrap_for_checkpointing(m):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(m)


def wrap_submodule(wrap):
    """Return a function that wraps only the submodule ``module`` of a model."""

    def wrapped(m):
        m.module = wrap(m.module)
        return m

    return wrapped


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "checkpoint": wrap_for_checkpointing,
    "compile of DataParallel": lambda m: torch.compile(nn.DataParallel(m)),
    "DataParallel of compile": lambda m: nn.DataParallel(torch.compile(m)),
    "DataParallel inside": wrap_submodule(nn.DataParallel),
    "compile inside": wrap_submodule(torch.compile),
    "checkpoint inside": wrap_submodule(wrap_for_checkpointing),
    "compile in DataParallel of compile": lambda m: nn.DataParallel(
        wrap_submodule(torch.compile)(m)
    ),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_do_not_change_the_saved_names(name):
    wrap = WRAPPERS[name]
    bare, other = Inner(), wrap(Inner())
    keys = ["module.weight", "module.bias", "out.weight", "out.bias"]

    def optimizer(m):
        made = optim.Adam(m.parameters())
        for p in m.parameters():
            p.grad = torch.randn_like(p)
        made.step()
        return made

    a, b = optimizer(bare), optimizer(other)
    for m, opt, live, live_opt in ((bare, a, other, b), (other, b, bare, a)):
        with torch.no_grad():
            for p in m.parameters():
                p.add_(torch.randn_like(p))
        url = save_state({"model": m, "optimizer": opt})
        assert [k for k in limpet.open(url) if k.startswith("model/")] == [
            f"model/{k}" for k in keys
        ]
        assert f"optimizer/state/model.{keys[0]}/exp_avg" in limpet.open(url)
        limpet.load(url, into={"model": live, "optimizer": live_opt})
        assert_same(list(m.parameters()), list(live.parameters()))
        assert_same(list(opt.state.values()), list(live_opt.state.values()))


def test_names_that_become_equal_without_their_wrappers_are_refused():
    m = nn.Module()
    m.a = nn.Linear(1, 1)
    m._orig_mod = nn.Module()
    m._orig_mod.a = nn.Linear(1, 1)
    with pytest.raises(PlanError, match="the same name without their wrapper"):
        limpet.save(unused_url(), {"model": m})


def step(m, opt, x):
    def closure():
        opt.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


def assert_training_continues(a, b, x, steps=3):
    """Assert that training from both states gives bit-identical parameters and slots."""
    for _ in range(steps):
        step(*a, x)
        step(*b, x)
    assert_same(list(a[0].parameters()), list(b[0].parameters()))
    assert_same(list(a[1].state.values()), list(b[1].state.values()))
    assert_same([options(g) for g in a[1].param_groups], [options(g) for g in b[1].param_groups])


def options(group):
    return {k: v for k, v in sorted(group.items()) if k != "params"}


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD maximize": lambda p: optim.SGD(p, 0.01, momentum=0.9, maximize=True, foreach=True),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, 0.01, fused=True),
    "Adam differentiable": lambda p: optim.Adam(p, torch.tensor(0.01)),
    "AdamW": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, torch.tensor(0.01), fused=True),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
    "Adadelta": lambda p: optim.Adadelta(p, 0.1),
    "Adafactor": lambda p: optim.Adafactor(p, 0.01),
    "Adafactor without lr": optim.Adafactor,
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    "ASGD": lambda p: optim.ASGD(p, 0.1, t0=2),
    "LBFGS": lambda p: optim.LBFGS(p, 0.1, max_iter=3, history_size=3),
    "LBFGS search": lambda p: optim.LBFGS(p, 0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": lambda p: optim.NAdam(p, 0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
}


@pytest.mark.parametrize("before", ["new", "stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_exactly_with_every_optimizer(name, before):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

    def make(seed):
        m = net(seed)
        return m, OPTIMIZERS[name](m.parameters())

    m, opt = make(0)
    for _ in range(2):
        step(m, opt, x)
    live, live_opt = make(1)
    if before == "stepped":
        for _ in range(3):
            step(live, live_opt, x)
    url = save_state({"model": m, "optimizer": opt})
    limpet.load(url, into={"model": live, "optimizer": live_opt})
    for p, q in zip(m.parameters(), live.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    assert_training_continues((m, opt), (live, live_opt), x)


def test_slots_that_the_snapshot_lacks_are_removed_and_missing_slots_are_created():
    m, live = net(), net(1)
    opt, live_opt = (optim.SGD(x.parameters(), 0.1, momentum=0.9) for x in (m, live))
    m[0].weight.grad = torch.ones(8, 4)
    opt.step()
    step(live, live_opt, torch.randn(3, 4))
    assert len(live_opt.state) == 6
    kept = live_opt.state[live[0].weight]["momentum_buffer"]
    limpet.load(save_state({"m": m, "o": opt}), into={"m": live, "o": live_opt})
    assert list(live_opt.state) == [live[0].weight]
    assert live_opt.state[live[0].weight]["momentum_buffer"] is kept
    new = optim.SGD(live.parameters(), 0.1, momentum=0.9)
    limpet.load(save_state({"m": m, "o": opt}), into={"m": live, "o": new})
    assert list(new.state) == [live[0].weight]


def test_groups_keep_their_options_and_order():
    def make(lr):
        m = net()
        decay, rest = [m[0].weight, m[2][0].weight], [m[0].bias, m[2][0].bias]
        return m, optim.AdamW(
            [{"params": decay, "weight_decay": 0.5, "name": "decay"}, {"params": rest}], lr
        )

    (m, opt), (live, live_opt) = make(0.1), make(0.2)
    opt.param_groups[1]["lr"] = 0.03
    step(m, opt, torch.randn(3, 4))
    url = save_state({"m": m, "o": opt})
    limpet.load(url, into={"m": live, "o": live_opt})
    assert_same([options(g) for g in opt.param_groups], [options(g) for g in live_opt.param_groups])
    assert_training_continues((m, opt), (live, live_opt), torch.randn(3, 4))
    live_opt.param_groups.reverse()
    with pytest.raises(PlanError, match=r"groups/0/params/m\.0\.bias"):
        limpet.load(url, into={"m": live, "o": live_opt})


def test_optimizers_with_and_without_named_parameters_are_compatible():
    m, live = net(), net(1)
    opt, live_opt = optim.Adam(m.named_parameters()), optim.Adam(live.parameters())
    step(m, opt, torch.randn(3, 4))
    url = save_state({"m": m, "o": opt})
    limpet.load(url, into={"m": live, "o": live_opt})
    assert_same(list(opt.state.values()), list(live_opt.state.values()))
    assert "param_names" not in live_opt.param_groups[0]
    named = optim.Adam(live.named_parameters())
    names = named.param_groups[0]["param_names"]
    limpet.load(url, into={"m": live, "o": named})
    assert named.param_groups[0]["param_names"] == names


def test_two_models_with_equal_parameter_names_are_restored():
    def make(seed):
        g, d = net(seed), net(seed + 10)
        return {
            "g": g,
            "d": d,
            "opt_g": optim.Adam(g.parameters()),
            "opt_d": optim.Adam(d.parameters()),
        }

    a, b = make(0), make(1)
    x = torch.randn(3, 4)
    step(a["g"], a["opt_g"], x)
    step(a["d"], a["opt_d"], x)
    step(a["d"], a["opt_d"], x)
    limpet.load(save_state(a), into=b)
    for m, o in (("g", "opt_g"), ("d", "opt_d")):
        assert_training_continues((a[m], a[o]), (b[m], b[o]), x)


@pytest.mark.parametrize(
    "modules",
    [
        lambda a, b: {1: a, "1": b},
        lambda a, b: [a, {"x": (b,)}],
        lambda a, b: {"x/y": a, "x~1y": b},
    ],
)
def test_an_optimizer_of_two_modules_is_restored(modules):
    def make(seed):
        a, b = net(seed), net(seed + 5)
        return a, b, optim.Adam([*a.parameters(), *b.parameters()])

    a, b, opt = make(0)
    step(nn.Sequential(a, nn.Linear(2, 4), b), opt, torch.randn(3, 4))
    la, lb, live_opt = make(1)
    url = save_state({"models": modules(a, b), "o": opt})
    limpet.load(url, into={"models": modules(la, lb), "o": live_opt})
    assert_same_state_dict(a, la)
    assert_same_state_dict(b, lb)
    assert_same(list(opt.state.values()), list(live_opt.state.values()))


def test_two_parameters_with_the_same_name_are_refused():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    opt = optim.Adam([*a.parameters(), *b.parameters()])
    step(nn.Sequential(a, b), opt, torch.randn(1, 1))
    with pytest.raises(PlanError, match=r"would both be named x\.y\.weight"):
        limpet.save(unused_url(), {"x.y": a, "x": {"y": b}, "o": opt})


def test_optimizer_state_for_a_parameter_of_no_group_is_refused():
    m = nn.Linear(1, 1)
    opt = optim.Adam(m.parameters())
    opt.state[nn.Parameter(torch.ones(1))] = {"step": torch.ones(())}
    with pytest.raises(PlanError, match="state of an unknown kind"):
        limpet.save(unused_url(), {"m": m, "o": opt})
    opt.state.clear()
    opt.state.update({"m.weight": 5, m.weight: {}})
    with pytest.raises(PlanError, match="by other keys than their names"):
        limpet.save(unused_url(), {"m": m, "o": opt})


def test_the_state_of_another_kind_of_optimizer_is_refused():
    m = net()
    url = save_state({"m": m, "o": optim.SGD(m.parameters(), 0.1, momentum=0.9)})
    adam = optim.Adam(m.parameters(), 0.5)
    with pytest.raises(UnexpectedLeaf, match=r"o/groups/0/momentum"):
        limpet.load(url, into={"m": m, "o": adam})
    assert (adam.param_groups[0]["lr"], dict(adam.state)) == (0.5, {})
    # An option that both optimizers have can be loaded by its key.
    limpet.load(url, into={"m": m, "o": adam}, keys=["m", "o/groups/*/lr"])
    assert adam.param_groups[0]["lr"] == 0.1


def test_an_option_that_an_optimizer_adds_at_its_first_step_is_loaded():
    """Optimizers of timm and apex count their steps in such an option. A new optimizer does not
    have it yet."""
    m = net()
    trained, fresh = optim.SGD(m.parameters(), 0.1), optim.SGD(m.parameters(), 0.1)
    trained.param_groups[0]["step"] = 7
    limpet.load(save_state({"m": m, "o": trained}), into={"m": m, "o": fresh})
    assert fresh.param_groups[0]["step"] == 7


def test_options_of_another_pytorch_version():
    m = net()
    older, newer = (optim.SGD(m.parameters(), lr) for lr in (0.1, 0.2))
    for group in (older.param_groups[0], older.defaults):
        del group["fused"]
    limpet.load(save_state({"m": m, "o": older}), into={"m": m, "o": newer})
    with pytest.raises(UnexpectedLeaf, match="1 unexpected in the snapshot: o/groups/0/fused"):
        limpet.load(save_state({"m": m, "o": newer}), into={"m": m, "o": older})
    limpet.load(save_state({"m": m, "o": newer}), into={"m": m, "o": older}, unexpected="ignore")


def test_an_option_that_the_snapshot_lacks_is_kept_and_reported():
    m = net()
    saved, live = (optim.SGD(m.parameters(), lr, momentum=0.9) for lr in (0.1, 0.2))
    for option in ("foreach", "fused", "nesterov"):  # as if a later PyTorch had added them
        del saved.param_groups[0][option]
    url = save_state({"m": m, "o": saved})
    assert limpet.load(url, into={"m": m, "o": live}).is_complete  # they are off
    live.param_groups[0] |= {"scale": 0.5, "foreach": True}
    report = limpet.load(url, into={"m": m, "o": live})
    assert live.param_groups[0]["scale"] == 0.5
    assert report.kept == dict.fromkeys(
        ("o/groups/0/foreach", "o/groups/0/scale"), "missing in the snapshot"
    )
    assert "kept 2 missing in the snapshot: o/groups/0/foreach, o/groups/0/scale" in report.summary
    assert limpet.load(url, into={"m": m, "o": live}, keys=["m", "o/groups/*/lr"]).is_complete


@pytest.mark.parametrize("node", [3, [1], {"state": {}}, {"state": 1, "groups": 2}, torch.ones(2)])
def test_a_value_that_is_no_optimizer_state_is_refused_by_an_optimizer(node):
    m = net()
    for state in (node, {"state": {}, "groups": [node]}):
        with pytest.raises(DTypeMismatch, match="live Adam"):
            limpet.load(save_state({"o": state}), into={"o": optim.Adam(m.parameters())})


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "LBFGS" not in n])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_dict_of_an_optimizer_is_loaded_into_a_live_optimizer(name, steps):
    x = torch.randn(3, 4)

    def make(seed, steps):
        m = net(seed)
        half = [p for p in m.parameters() if p.ndim > 1], [p for p in m.parameters() if p.ndim < 2]
        opt = OPTIMIZERS[name]([{"params": half[1]}, {"params": half[0]}])
        for _ in range(steps):
            step(m, opt, x)
        return m, opt

    m, opt = make(0, 2)
    live, live_opt = make(1, steps)
    url = save_state({"m": m.state_dict(), "o": opt.state_dict()})
    if "Adafactor" in name and not steps:
        # its slots have other shapes than its parameters, so that positions cannot be checked
        with pytest.raises(DTypeMismatch, match="at its position in the groups"):
            limpet.load(url, into={"m": live, "o": live_opt})
        return
    report = limpet.load(url, into={"m": live, "o": live_opt})
    assert not report.summary
    for p, q in zip(m.parameters(), live.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    assert_training_continues((m, opt), (live, live_opt), x)


def test_the_state_dict_of_an_optimizer_must_fit_the_live_groups():
    def make(*sizes, named=False):
        m = nn.Sequential(*[nn.Linear(n, n) for n in sizes])
        return m, optim.Adam(m.named_parameters() if named else m.parameters())

    m, opt = make(2, 3)
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    url = save_state({"o": opt.state_dict()})
    other, other_opt = make(2, 3, 4)
    message = r"o groups of 4 parameters, live groups of 6, and state_dict\(\) numbers them"
    with pytest.raises(DTypeMismatch, match=message):
        limpet.load(url, into={"m": other, "o": other_opt}, keys="o")
    other, other_opt = make(3, 2)
    message = r"m\.0\.weight/exp_avg \[2, 2\], live \[3, 3\] for m\.0\.weight at its position"
    for options in ({}, {"mismatched": "keep", "missing": "keep", "cast": True}):
        with pytest.raises(DTypeMismatch, match=message) as e:
            limpet.load(url, into={"m": other, "o": other_opt}, keys="o", **options)
    assert len(e.value.misfits) == 8
    assert not other_opt.state
    m, opt = make(2, 2, named=True)
    other, _ = make(2, 2)
    reordered = optim.Adam(reversed(list(other.named_parameters())))
    url = save_state({"o": opt.state_dict()})
    with pytest.raises(DTypeMismatch, match=r"o parameters 0\.weight, .*, live 1\.bias"):
        limpet.load(url, into={"m": other, "o": reordered}, keys="o")


def test_loading_only_the_model_leaves_the_optimizer_unchanged():
    m = net()
    opt = optim.SGD(m.parameters(), 0.1, momentum=0.9)
    step(m, opt, torch.randn(3, 4))
    live = net(1)
    live_opt = optim.SGD(live.parameters(), 0.7, momentum=0.9)
    into = {"m": live, "o": live_opt, "history": [1]}
    limpet.load(save_state({"m": m, "o": opt, "history": [1, 2]}), into=into, keys="m/**")
    assert_same_state_dict(m, live)
    assert not live_opt.state
    assert live_opt.param_groups[0]["lr"] == 0.7
    assert into["history"] == [1]


SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.95),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o), lrs.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_options_that_a_scheduler_added_are_loaded_without_a_scheduler():
    m = net()
    opt = optim.SGD(m.parameters(), 0.1)
    lrs.OneCycleLR(opt, 0.5, total_steps=20)
    live = optim.SGD(m.parameters(), 0.1)
    limpet.load(save_state({"m": m, "o": opt}), into={"m": m, "o": live})
    assert_same([options(g) for g in opt.param_groups], [options(g) for g in live.param_groups])


def test_a_stateful_object_with_tensors_and_values_is_restored():
    t = torch.randn(3)
    state = {"t": t, "list": [t, {"x": (1, None)}], "raw": b"z" * 5000, 5: "five"}
    a, b = Stateful(), Stateful()
    a.state = state
    limpet.load(save_state({"mine": a, "t": t}), into={"mine": b, "t": torch.zeros(3)})
    assert_same(state, b.state)


def test_a_dict_with_a_state_dict_method_is_saved_by_it():
    class Settings(dict):
        def state_dict(self):
            return {"all": dict(self)}

        def load_state_dict(self, state):
            self.update(state["all"])

    live = Settings()
    limpet.load(save_state({"s": Settings(a=1)}), into={"s": live})
    assert live == {"a": 1}


def test_load_state_dict_gets_tensors_with_their_own_memory():
    live = torch.zeros(3)
    b = Stateful()
    t = torch.ones(3)
    limpet.load(save_state({"t": t, "mine": Stateful(t=t)}), into={"t": live, "mine": b})
    assert b.state["t"].data_ptr() != live.data_ptr()
