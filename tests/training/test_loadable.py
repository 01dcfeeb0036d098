"""Members of a state that a save accepts, but no load restores: they are refused or reported at the
first step, and not when it is too late."""

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import PlanError
from limpet.state.loadable import shares_elements


class Metric(nn.Module):
    """Keeps its states as a metric of torchmetrics does: as plain attributes, not persistent."""

    def __init__(self, persistent=False, default=0.0):
        super().__init__()
        self._defaults, self._persistent = {}, {}
        self.add_state("total", torch.tensor(default), persistent)
        self.add_state("seen", [], persistent)

    def add_state(self, name, default, persistent):
        setattr(self, name, default)
        self._defaults[name], self._persistent[name] = default, persistent

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, persistent in self._persistent.items():
            if persistent:
                destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(self, state, prefix, *args):
        for name, persistent in self._persistent.items():
            if persistent:
                setattr(self, name, state.pop(prefix + name))
        super()._load_from_state_dict(state, prefix, *args)


def with_buffer(buffer, persistent=True):
    m = nn.Linear(2, 2)
    m.register_buffer("b", buffer, persistent=persistent)
    return m


def train(state, tmp_path, steps=3):
    with limpet.Checkpointer(tmp_path / "run", state, save=limpet.EverySteps(2)) as ckpt:
        for _ in range(steps):
            ckpt.step()
        return ckpt


OVERLAPPING = {
    "expanded": lambda: torch.ones(2, 1).expand(2, 3),
    "scalar": lambda: torch.ones(()).expand(4),
    "sliding window": lambda: torch.arange(10.0).unfold(0, 3, 1),
    "as_strided": lambda: torch.arange(10.0).as_strided((3, 3), (2, 1)),
    "large": lambda: torch.zeros(1 << 21).as_strided((1 << 10, 1 << 11), (1 << 10, 1)),
}
WRITABLE = {
    "contiguous": lambda: torch.ones(2, 3),
    "transposed": lambda: torch.ones(2, 3, 4).permute(2, 0, 1),
    "part": lambda: torch.ones(6, 6)[::2, 1:4],
    "one element": lambda: torch.ones(1).expand(1, 1),
    "empty": lambda: torch.ones(0, 1).expand(0, 5),
    "interleaved": lambda: torch.arange(10.0).as_strided((2, 3), (3, 2)),
    "dilated": lambda: torch.arange(30.0).as_strided((2, 3), (3, 6)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_tensor_whose_elements_share_memory_is_refused_at_the_first_step(name, tmp_path):
    tensor = OVERLAPPING[name]()
    assert shares_elements(tensor)
    for state, leaf in (
        ({"m": nn.Sequential(with_buffer(tensor))}, "m.0.b"),
        ({"list": [{"x": tensor}]}, "list.0.x"),
    ):
        with pytest.raises(PlanError, match="could be saved, but never loaded") as e:
            train(state, tmp_path, 1)
        assert e.value.leaves == (leaf,)
    url = tmp_path / "version_1"
    limpet.save(url, {"x": tensor})  # a plain save and load keep the values
    assert torch.equal(limpet.load(url)["x"], tensor)
    with pytest.raises(PlanError, match="share memory"):
        limpet.load(url, into={"x": tensor})


@pytest.mark.parametrize("name", WRITABLE)
def test_a_tensor_with_its_own_memory_is_saved_and_loaded(name, tmp_path):
    tensor = WRITABLE[name]()
    before = tensor.clone()
    assert not shares_elements(tensor)
    state = {"m": with_buffer(tensor), "x": tensor}
    train(state, tmp_path)
    tensor.zero_()
    with limpet.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
    assert torch.equal(tensor, before)


def test_an_expanded_constant_that_is_not_saved_is_no_problem(tmp_path):
    m = with_buffer(torch.ones(1).expand(4), persistent=False)
    m.mask = torch.ones(1).expand(3)
    train({"m": m}, tmp_path)


def test_an_expanded_slot_is_replaced():
    m = nn.Linear(2, 2, bias=False)
    opt = optim.SGD(m.parameters(), 0.1, momentum=0.9)
    m.weight.grad = torch.ones(2, 2)
    opt.step()
    url = "memory://slots/version_1"
    limpet.save(url, {"m": m, "o": opt})
    opt.state[m.weight]["momentum_buffer"] = torch.zeros(1, 1).expand(2, 2)
    limpet.load(url, into={"m": m, "o": opt})
    assert opt.state[m.weight]["momentum_buffer"].tolist() == [[1, 1], [1, 1]]


def test_views_of_one_buffer_are_saved_and_loaded(tmp_path):
    base = torch.arange(10.0)
    m = with_buffer(base)
    m.register_buffer("part", base[2:6])
    m.register_buffer("column", base.view(5, 2)[:, 1])
    train({"m": m}, tmp_path)
    base.zero_()
    with limpet.Checkpointer(tmp_path / "run", {"m": m}) as ckpt:
        ckpt.resume()
    assert base.tolist() == list(range(10))


def test_a_persistent_metric_is_restored(tmp_path):
    metric = Metric(persistent=True, default=3.0)
    metric.seen += [torch.ones(2), torch.ones(5)]
    url = tmp_path / "version_1"
    limpet.save(url, {"m": metric})
    live = Metric(persistent=True)
    limpet.load(url, into={"m": live})
    assert (live.total.item(), [len(t) for t in live.seen]) == (3, [2, 5])


def prepare(channels=4, backend="fbgemm"):
    quantization = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten())
    m = quantization.QuantWrapper(m)
    m.qconfig = quantization.get_default_qat_qconfig(backend)
    return quantization.prepare_qat(m.train())


X = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def observe(m, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        m(X).square().mean().backward()
        opt.step()


def train_prepared(steps, backend="fbgemm"):
    m = prepare(backend=backend)
    opt = optim.SGD(m.parameters(), 0.1, momentum=0.9)
    observe(m, opt, steps)
    return {"m": m, "o": opt}


@pytest.mark.filterwarnings("ignore:.*(deprecated|quant|reduce_range|observer)")
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_a_prepared_model_continues_exactly(backend, before):
    url = f"memory://{backend}{before}/version_1"
    a, b = train_prepared(3, backend), train_prepared(before, backend)
    limpet.save(url, a)
    limpet.load(url, into=b)
    for state in (a, b):
        observe(state["m"], state["o"], 3)
    for (name, x), y in zip(a["m"].state_dict().items(), b["m"].state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.filterwarnings("ignore:.*(deprecated|quant|reduce_range|observer)")
def test_a_prepared_model_of_another_size_is_refused_before_anything_is_changed():
    state = train_prepared(1)
    limpet.save("memory://qat/version_1", {"m": state["m"]})
    live = prepare(channels=5)
    before = {k: v.clone() for k, v in live.state_dict().items()}
    with pytest.raises(PlanError, match=r"0\.weight \[4, 3, 3, 3\], live \[5, 3, 3, 3\]") as e:
        limpet.load("memory://qat/version_1", into={"m": live})
    assert not any("weight_fake_quant" in key for key in e.value.misfits)  # these could be loaded
    for name, value in live.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("failure", ["refuses", "raises", "ignores"])
def test_a_buffer_that_the_module_does_not_resize_is_refused(failure):
    class Own(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.register_buffer("b", torch.zeros(n))

        def _load_from_state_dict(self, state, prefix, *args):
            if failure == "raises":
                raise ValueError(failure)
            if failure == "refuses":
                super()._load_from_state_dict(state, prefix, *args)

    limpet.save(f"memory://own-{failure}/version_1", {"m": Own(3)})
    with pytest.raises(limpet.errors.ShapeMismatch, match=r"m/b \[3\], live \[2\]"):
        limpet.load(f"memory://own-{failure}/version_1", into={"m": Own(2)})
