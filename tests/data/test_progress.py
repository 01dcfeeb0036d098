"""Progress and RNG: what comes back after a resume is what would have followed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import PlanError
from holdfast.storage.memory import MemoryStore


def draw() -> tuple[float, float, float, list[float]]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        torch.randn(3).tolist(),
    )


def test_random_numbers_go_on_where_they_were() -> None:
    store = MemoryStore()
    np.random.normal()  # leaves one number cached, which is state too
    random.gauss(0, 1)
    holdfast.save(store, {"rng": holdfast.RNG()})
    expected = [draw() for _ in range(3)]
    draw()
    holdfast.load(store, into={"rng": holdfast.RNG()})
    assert [draw() for _ in range(3)] == expected


def test_progress_comes_back() -> None:
    store = MemoryStore()
    progress = holdfast.Progress()
    progress.epoch, progress.step, progress.samples = 3, 70, 2240
    holdfast.save(store, {"progress": progress})
    other = holdfast.Progress()
    holdfast.load(store, into={"progress": other})
    assert (other.epoch, other.step, other.samples) == (3, 70, 2240)
    assert repr(other) == "Progress(epoch=3, step=70, samples=2240)"


def test_progress_refuses_another_state() -> None:
    with pytest.raises(PlanError, match="epoch, step, and samples"):
        holdfast.Progress().load_state_dict({"epoch": 1})


class FakeDevice:
    """A device module as ``torch.cuda`` and its like are, with a generator per device."""

    def __init__(self, count: int, initialized: bool = True) -> None:
        self.generators = [torch.Generator().manual_seed(i) for i in range(count)]
        self.initialized = initialized

    def is_initialized(self) -> bool:
        return self.initialized

    def get_rng_state(self, device: int = 0) -> torch.Tensor:
        return self.generators[device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int = 0) -> None:
        self.generators[device].set_state(state)

    def draw(self) -> list[float]:
        return [float(torch.rand(1, generator=g)) for g in self.generators]


class FakeMps(FakeDevice):
    """One that cannot be asked whether it is used, and whose only device has no number."""

    def __init__(self) -> None:
        super().__init__(1)

    def __getattribute__(self, name: str) -> object:
        if name == "is_initialized":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def get_rng_state(self) -> torch.Tensor:  # type: ignore[override]
        return self.generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:  # type: ignore[override]
        self.generators[0].set_state(state)


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, FakeDevice], None]:
    """Has PyTorch find another accelerator, and ask it as little as it asks a real one."""

    def to(kind: str, device: FakeDevice) -> None:
        accelerator = SimpleNamespace(
            current_accelerator=lambda: SimpleNamespace(type=kind),
            is_available=lambda: bool(device.generators),
            device_count=lambda: len(device.generators),
        )
        monkeypatch.setattr(torch, "accelerator", accelerator)
        monkeypatch.setattr(torch, "get_device_module", lambda d: device)

    return to


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_device_goes_on(plug: Callable[[str, FakeDevice], None], count: int) -> None:
    store = MemoryStore()
    device = FakeDevice(count)
    plug("cuda", device)
    holdfast.save(store, {"rng": holdfast.RNG()})
    expected = device.draw()
    other = FakeDevice(count)
    other.draw()
    plug("cuda", other)
    holdfast.load(store, into={"rng": holdfast.RNG()})
    assert other.draw() == expected


def test_a_device_without_numbers_goes_on(plug: Callable[[str, FakeDevice], None]) -> None:
    device = FakeMps()
    plug("mps", device)
    state = holdfast.RNG().state_dict()
    expected = device.draw()
    holdfast.RNG().load_state_dict(state)
    assert device.draw() == expected


@pytest.mark.parametrize(("saved", "there"), [(2, 4), (4, 2), (4, 1), (1, 4), (2, 0)])
def test_devices_that_were_not_there_keep_theirs(
    plug: Callable[[str, FakeDevice], None], saved: int, there: int
) -> None:
    first = FakeDevice(saved)
    plug("xpu", first)
    state = holdfast.RNG().state_dict()
    assert len(state["xpu"]) == saved
    drawn = first.draw()
    second = FakeDevice(there)
    for g in second.generators:
        g.manual_seed(99)
    untouched = [torch.rand(1, generator=torch.Generator().manual_seed(99)).item()] * there
    plug("xpu", second)
    holdfast.RNG().load_state_dict(state)
    common = min(saved, there)
    assert second.draw() == drawn[:common] + untouched[common:]


def test_another_kind_of_device_keeps_its_generators(
    plug: Callable[[str, FakeDevice], None],
) -> None:
    plug("cuda", FakeDevice(2))
    state = holdfast.RNG().state_dict()
    other, twin = FakeDevice(2), FakeDevice(2)
    plug("xpu", other)
    holdfast.RNG().load_state_dict(state)
    assert other.draw() == twin.draw()


def test_a_device_that_the_program_does_not_use_is_not_woken(
    plug: Callable[[str, FakeDevice], None],
) -> None:
    class Asleep(FakeDevice):
        def get_rng_state(self, device: int = 0) -> torch.Tensor:
            raise AssertionError("this starts the device")

    device = Asleep(1, initialized=False)
    plug("cuda", device)
    torch.accelerator.is_available = lambda: pytest.fail("this may spoil a later fork")  # type: ignore[method-assign]
    assert "cuda" not in holdfast.RNG().state_dict()


def test_a_state_without_devices_loads_where_there_are_some(
    plug: Callable[[str, FakeDevice], None],
) -> None:
    state = holdfast.RNG().state_dict()
    device, twin = FakeDevice(2), FakeDevice(2)
    plug("cuda", device)
    holdfast.RNG().load_state_dict(state)
    assert device.draw() == twin.draw()


@pytest.mark.parametrize("state", [{}, {"python": 1}, [], None])
def test_rng_refuses_another_state(state: object) -> None:
    with pytest.raises(PlanError, match="not the state of an RNG"):
        holdfast.RNG().load_state_dict(state)  # type: ignore[arg-type]


def test_torch_is_taken_only_if_the_program_has_loaded_it(tmp_path: Path) -> None:
    """A state of arrays is saved, and comes back, where PyTorch is not loaded; one that has
    PyTorch's generator sets it also where PyTorch comes later."""
    script = """
import random, sys
import numpy as np
import holdfast
def save(name):
    holdfast.save(sys.argv[1] + name, {"w": np.zeros(3), "rng": holdfast.RNG()})
def load(name):
    holdfast.load(sys.argv[1] + name, into={"w": np.ones(3), "rng": holdfast.RNG()})
if sys.argv[2] == "save":
    save("/bare")
    drawn = random.random(), np.random.normal()
    load("/bare")
    assert drawn == (random.random(), np.random.normal())
    assert "torch" not in sys.modules
    import torch
    torch.manual_seed(7)
    load("/bare")
    assert torch.initial_seed() == 7
    save("/whole")
else:
    load("/whole")
    import torch
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.rand(3).tolist() == expected.tolist()
"""
    for turn in ("save", "load"):
        subprocess.run([sys.executable, "-c", script, tmp_path, turn], check=True)
