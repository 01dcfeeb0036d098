"""Modes of PyTorch that apply to a whole block or process change no value, device, or dtype."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import Unsupported
from tests.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:ComplexHalf")


@contextlib.contextmanager
def setting(set_value, value, usual):
    set_value(value)
    try:
        yield
    finally:
        set_value(usual)


MODES = {
    "none": contextlib.nullcontext,
    "meta device": lambda: torch.device("meta"),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "float16": lambda: setting(torch.set_default_dtype, torch.float16, torch.float32),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}
PLAIN = ("list", "sparse", "csr", "conjugate", "half", "epoch", "lr", "empty", "bytes", "numpy")


class Own:
    def __init__(self, seed):
        self.t = torch.full((3,), float(seed))

    def state_dict(self):
        return {"t": self.t, "n": 1}

    def load_state_dict(self, state):
        self.t = state["t"]


def make(seed, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    hooked = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    hooked.register_state_dict_post_hook(lambda o, state: state)
    state = {
        "model": model,
        "optimizer": optim.AdamW(model.parameters(), lr=0.01, fused=True),
        "hooked": hooked,
        "own": Own(seed),
        "list": [torch.randn(3), np.arange(3)],
        "sparse": torch.diag(torch.randn(3)).to_sparse(),
        "csr": torch.diag(torch.randn(3)).to_sparse_csr(),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "half": torch.randn(3, 4).t().half(),
        "epoch": seed,
        "lr": torch.tensor(0.5),
        "empty": torch.empty(0),
        "bytes": b"x" * 5000,
        "numpy": np.float32(2),
        "rng": limpet.RNG(),
        "progress": limpet.Progress(),
    }
    for _ in range(steps):
        train(state)
    return state


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(2, 3, 5, 5)).square().mean().backward()
    state["optimizer"].step()
    state["hooked"].step()
    state["own"].t.add_(1)
    state["list"][0].add_(1)


def contents(state):
    members = {k: dict(state[k].state_dict()) for k in ("model", "optimizer", "hooked", "own")}
    return members | {k: state[k] for k in PLAIN}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = make(1, 2)
    limpet.save("saved", state)
    return state


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def test_saves(mode, saved):
    with mode():
        limpet.save("a", saved)
        limpet.save_async("b", saved).wait()
    for url in ("a", "b"):
        live = make(2, 0)
        limpet.load(url, into=live)
        assert_same(contents(saved), contents(live))


def test_loads_of_a_new_state(mode, saved):
    with mode():
        state = limpet.load("saved")
        one = limpet.load("saved", keys="half", device="saved")["half"]
        part = limpet.open("saved")["half"][1:2]
    assert_same({k: saved[k] for k in PLAIN}, {k: state[k] for k in PLAIN})
    assert_same([saved["half"], saved["half"][1:2]], [one, part])
    model = make(2, 0)["model"]
    model.load_state_dict(state["model"], assign=True)
    model(torch.randn(2, 3, 5, 5)).mean().backward()
    state["list"][0].add_(1)


@pytest.mark.parametrize("steps", [0, 1])
def test_loads_into_a_state(mode, saved, steps):
    live, cast = make(2, steps), make(2, steps)
    cast["model"].double()
    with mode():
        limpet.load("saved", into=live)
        limpet.load("saved", into=cast, cast=True)
    assert_same(contents(saved), contents(live))
    assert_same(saved["model"][0].weight.double().detach(), cast["model"][0].weight.detach())
    train(live)


def test_resumes(mode, saved):
    saved, live = make(3, 1), make(2, 0)
    options = {"save": limpet.EverySteps(1) | limpet.OnException(), "quiet": True}
    with mode(), limpet.Checkpointer("run", saved, **options) as ckpt:
        ckpt.step()
    with mode(), limpet.Checkpointer("run", live, **options) as ckpt:
        ckpt.resume()
    assert_same(contents(saved), contents(live))
    train(live)


def test_imports_and_exports(mode, saved):
    foreign = {"model": saved["model"].state_dict(), "t": {k: saved[k] for k in ("sparse", "half")}}
    torch.save(foreign, "a.pt")
    with mode():
        limpet.export("saved", "out.pt", to="torch", keys=["model/**", "optimizer/**"], root="/")
        limpet.export("saved", "out", to="safetensors")
        limpet.import_checkpoint("a.pt", "from-torch")
        limpet.import_checkpoint("out/model.safetensors", "from-safetensors")
        assert limpet.open("from-torch").verify().ok
    exported = torch.load("out.pt")
    assert_same(contents(saved)["model"], dict(exported["model"]))
    assert_same(contents(saved)["optimizer"]["state"], exported["optimizer"]["state"])
    assert_same(foreign["t"], limpet.load("from-torch")["t"])
    for url in ("from-torch", "from-safetensors"):
        live = make(2, 0)["model"]
        limpet.load(url, into={"model": live}, keys="model/**")
        assert_same(contents(saved)["model"], dict(live.state_dict()))


@pytest.mark.parametrize("inside", [False, True])
def test_tensors_of_the_inference_mode_are_loaded_anywhere(saved, inside):
    with torch.inference_mode():
        live = {"list": [torch.zeros(3), np.zeros(3, int)], "half": torch.zeros(3, 4).t().half()}
    with torch.inference_mode(inside):
        limpet.load("saved", into=live, keys=["list/**", "half"])
    assert_same({k: saved[k] for k in live}, live)


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_a_save_within_a_transform_is_refused(transform, tmp_path):
    def save(x):
        limpet.save(tmp_path / "a", {"x": x})
        return x

    with pytest.raises(Unsupported, match=r"torch\.func"):
        transform(save)(torch.randn(3, 2))
