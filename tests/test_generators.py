"""The states of the random generators, and seeds that are functions of a position."""

import random
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import limpet
from limpet.generators import (
    NUMPY,
    PYTHON,
    TORCH,
    capture_states,
    digest,
    kept_generators,
    restore_states,
    seed_generators,
)
from limpet.storage.memory import MemoryStore

GOLDEN = 1394891422, 1629679059
GOLDEN_SEED = 5962233923238437505
GOLDEN_DIGEST = 8415240736594023236


@pytest.fixture(autouse=True)
def _generators():
    before = capture_states()
    yield
    restore_states(before)


def draw():
    """Draw from every generator, in a way that also uses what each of them caches."""
    return (
        random.random(), random.gauss(0, 1), float(np.random.random()), float(np.random.normal()),
        torch.randn(1).item(), torch.rand(20).tolist(),
    )  # fmt: skip


def test_a_position_decides_all_numbers_that_follow():
    """Also those that a generator has cached."""
    found = []
    for position in ((1, 2), (1, 3), (2, 2), (1, 2, 0), (2**64 - 1, 0)):
        seed_generators(*position)
        found.append(draw())
        seed_generators(*position)
        assert draw() == found[-1]
    assert len(set(map(repr, found))) == len(found)
    for number in range(6):
        assert len({repr(numbers[number]) for numbers in found}) == len(found)


def test_the_numbers_of_a_position_never_change():
    """Resumed runs get the same numbers with a later release. PyTorch promises less."""
    seed_generators(1, 2, 3)
    assert (random.getrandbits(32), np.random.randint(2**31)) == GOLDEN
    assert torch.initial_seed() == GOLDEN_SEED
    assert digest(1, "a") == GOLDEN_DIGEST


def test_numpy_and_torch_get_different_numbers():
    """They share one algorithm: with one seed, augmentation and dropout would be correlated."""
    for number in range(20):
        seed_generators(number)
        state = torch.get_rng_state()[24 : 24 + 4 * 624 * 2].numpy().view(np.uint64)
        assert not np.array_equal(state.astype(np.uint32), np.random.get_state()[1])


@pytest.mark.parametrize("kinds", range(8))
def test_only_the_given_kinds_are_seeded(kinds):
    seed_generators(5)
    seeded = draw()
    seed_generators(6)
    other = draw()
    seed_generators(6)
    seed_generators(5, kinds=kinds)
    expected = [
        (seeded if kinds & kind else other)[number]
        for number, kind in enumerate((PYTHON, PYTHON, NUMPY, NUMPY, TORCH, TORCH))
    ]
    assert list(draw()) == expected


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
def test_a_block_keeps_all_generators(error):
    seed_generators(3)
    draw()  # so that each generator caches a second normal number
    states = capture_states()
    expected = draw()
    restore_states(states)
    with nullcontext() if error is None else pytest.raises(error), kept_generators():
        assert draw() == expected
        seed_generators(9)
        if error is not None:
            raise error
    assert draw() == expected


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_an_rng_is_saved_and_loaded_in_inference_mode(mode):
    store = MemoryStore()
    with mode():
        limpet.save(store, {"rng": limpet.RNG(), "x": torch.rand(3)})
    expected = draw()
    with mode():
        limpet.load(store, into={"rng": limpet.RNG(), "x": torch.rand(3)}, keys="rng/**")
    assert draw() == expected


def test_another_bit_generator_of_numpy():
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        store = MemoryStore()
        limpet.save(store, {"rng": limpet.RNG()})
        expected = np.random.normal()
        limpet.load(store, into={"rng": limpet.RNG()})
        assert np.random.normal() == expected
    finally:
        np.random.set_bit_generator(original)


class FakeDevices:
    """A device module such as ``torch.cuda``: its generators exist after it is initialized."""

    def __init__(self, count, initialized):
        self.default_generators = [torch.Generator() for _ in range(count)]
        self.initialized = initialized
        self.seed_all(torch.initial_seed())

    def seed_all(self, number):
        for g in self.default_generators:
            g.manual_seed(number)

    def is_initialized(self):
        return self.initialized

    def get_rng_state(self, device=0):
        assert self.initialized, "this initializes the device"
        return self.default_generators[device].get_state()

    def set_rng_state(self, state, device=0):
        assert self.initialized, "this initializes the device"
        self.default_generators[device].set_state(state)

    def current_device(self):
        return 1

    def draw(self):
        self.initialized = True
        return [float(torch.rand(1, generator=g)) for g in self.default_generators]


@pytest.fixture
def install(monkeypatch):
    def install(count, initialized=True):
        devices = FakeDevices(count, initialized)
        accelerator = SimpleNamespace(
            current_accelerator=lambda: SimpleNamespace(type="cuda"),
            is_available=lambda: devices.initialized or pytest.fail("this could break a fork"),
            device_count=lambda: count,
        )
        monkeypatch.setattr(torch, "accelerator", accelerator)
        monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
        return devices

    return install


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_generators_of_all_devices_are_kept(install, count):
    devices, twin = install(count), FakeDevices(count, True)
    devices.draw(), twin.draw()
    with kept_generators():
        devices.draw()
        devices.seed_all(5)
    assert devices.draw() == twin.draw()


def test_the_current_device_is_seeded(install):
    devices = install(2)
    seed_generators(1)
    first = devices.draw()
    seed_generators(1)
    second = devices.draw()
    assert first[1] == second[1]
    assert first[0] != second[0]


def test_devices_are_not_initialized(install):
    install(2, initialized=False)
    with kept_generators():
        draw()
    seed_generators(1)
    limpet.save(MemoryStore(), {"rng": limpet.RNG()})


def test_seeding_imports_neither_numpy_nor_torch():
    code = (
        "import random, sys, limpet.generators as g\n"
        "g.seed_generators(1, 2, 3); print(random.getrandbits(32))\n"
        "with g.kept_generators(): random.random()\n"
        "print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == [f"{GOLDEN[0]}", "[]"]
