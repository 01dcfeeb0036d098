"""``Progress`` and ``RNG``: a resumed training gets the same values as an uninterrupted one."""

import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import PlanError
from limpet.storage.memory import MemoryStore


def draw():
    return (random.random(), random.gauss(0, 1), float(np.random.normal()), torch.randn(3).tolist())


def test_random_numbers_continue_after_a_load():
    store = MemoryStore()
    np.random.normal()  # caches a second number, which is part of the state
    random.gauss(0, 1)
    limpet.save(store, {"rng": limpet.RNG()})
    expected = [draw() for _ in range(3)]
    draw()
    limpet.load(store, into={"rng": limpet.RNG()})
    assert [draw() for _ in range(3)] == expected


def test_progress_is_restored():
    store = MemoryStore()
    progress = limpet.Progress()
    progress.load_state_dict({"epoch": 3, "step": 70, "samples": 0})
    progress.samples = 2240
    limpet.save(store, {"progress": progress})
    other = limpet.Progress()
    limpet.load(store, into={"progress": other})
    assert (other.epoch, other.step, other.samples) == (3, 70, 2240)
    assert repr(other) == "Progress(epoch=3, step=70, samples=2240)"


def test_progress_rejects_another_state():
    with pytest.raises(PlanError, match="not the state of a Progress"):
        limpet.Progress().load_state_dict({"epoch": 1})


class FakeDevice:
    """A device module like ``torch.cuda``, with a generator per device."""

    def __init__(self, count, initialized=True):
        self.generators = [torch.Generator().manual_seed(i) for i in range(count)]
        self.initialized = initialized

    def is_initialized(self):
        return self.initialized

    def get_rng_state(self, device=0):
        return self.generators[device].get_state()

    def set_rng_state(self, state, device=0):
        self.generators[device].set_state(state)

    def draw(self):
        return [float(torch.rand(1, generator=g)) for g in self.generators]


class FakeMps(FakeDevice):
    """A device module without ``is_initialized``, whose only device has no index."""

    def __init__(self):
        super().__init__(1)

    def __getattribute__(self, name):
        if name == "is_initialized":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def get_rng_state(self):
        return self.generators[0].get_state()

    def set_rng_state(self, state):
        self.generators[0].set_state(state)


@pytest.fixture
def install_device(monkeypatch):
    """Return a function that makes PyTorch find a fake accelerator."""

    def install(kind, device):
        accelerator = SimpleNamespace(
            current_accelerator=lambda: SimpleNamespace(type=kind),
            is_available=lambda: bool(device.generators),
            device_count=lambda: len(device.generators),
        )
        monkeypatch.setattr(torch, "accelerator", accelerator)
        monkeypatch.setattr(torch, "get_device_module", lambda d: device)

    return install


def test_the_generator_of_a_device_without_index_continues(install_device):
    device = FakeMps()
    install_device("mps", device)
    state = limpet.RNG().state_dict()
    expected = device.draw()
    limpet.RNG().load_state_dict(state)
    assert device.draw() == expected


@pytest.mark.parametrize(("saved", "available"), [(2, 4), (4, 2), (4, 1), (1, 4), (2, 0)])
def test_devices_without_saved_state_keep_their_generators(install_device, saved, available):
    first = FakeDevice(saved)
    install_device("xpu", first)
    state = limpet.RNG().state_dict()
    assert len(state["xpu"]) == saved
    drawn = first.draw()
    second = FakeDevice(available)
    for g in second.generators:
        g.manual_seed(99)
    untouched = [torch.rand(1, generator=torch.Generator().manual_seed(99)).item()] * available
    install_device("xpu", second)
    limpet.RNG().load_state_dict(state)
    common = min(saved, available)
    assert second.draw() == drawn[:common] + untouched[common:]


def test_another_kind_of_device_keeps_its_generators(install_device):
    install_device("cuda", FakeDevice(2))
    state = limpet.RNG().state_dict()
    other, twin = FakeDevice(2), FakeDevice(2)
    install_device("xpu", other)
    limpet.RNG().load_state_dict(state)
    assert other.draw() == twin.draw()


@pytest.mark.parametrize("state", [{}, {"python": 1}, [], None])
def test_rng_rejects_another_state(state):
    with pytest.raises(PlanError, match="not the state of an RNG"):
        limpet.RNG().load_state_dict(state)


@pytest.mark.slow
def test_torch_is_not_imported_for_the_rng(tmp_path):
    """A state without PyTorch's generator is saved and restored without PyTorch.

    A saved generator is also restored if the program imports PyTorch later.
    """
    script = """
import random, sys
import numpy as np
import limpet
def save(name):
    limpet.save(sys.argv[1] + name, {"w": np.zeros(3), "rng": limpet.RNG()})
def load(name):
    limpet.load(sys.argv[1] + name, into={"w": np.ones(3), "rng": limpet.RNG()})
if sys.argv[2] == "save":
    save("/without_torch")
    drawn = random.random(), np.random.normal()
    load("/without_torch")
    assert drawn == (random.random(), np.random.normal())
    assert "torch" not in sys.modules
    import torch
    torch.manual_seed(7)
    load("/without_torch")
    assert torch.initial_seed() == 7
    save("/with_torch")
else:
    load("/with_torch")
    import torch
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.rand(3).tolist() == expected.tolist()
"""
    for action in ("save", "load"):
        subprocess.run([sys.executable, "-c", script, tmp_path, action], check=True)
