"""``isolated_rng``: a block leaves every random generator as it was, and a save in it knows."""

import asyncio
import random
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import limpet
from limpet.errors import LimpetError
from limpet.generators import capture_states, restore_states
from limpet.storage.memory import MemoryStore


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


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_a_block_restores_all_generators():
    seed(3)
    draw()  # so that each generator caches a second normal number
    expected = [draw() for _ in range(3)]
    seed(3)
    draw()
    drawn = []
    for _ in range(3):
        with limpet.isolated_rng():
            inside = draw(), draw()
            seed(99)
            random.shuffle([1, 2, 3])
            list(DataLoader(range(3), shuffle=True))
        drawn.append(draw())
        assert inside[0] == drawn[-1]  # the block continues from the state of the training
    assert drawn == expected


def test_a_block_restores_all_generators_after_an_exception():
    seed(4)
    expected = draw()
    for error in (ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit):
        seed(4)
        with pytest.raises(error), limpet.isolated_rng():
            draw()
            raise error
        assert draw() == expected


def test_blocks_can_be_nested_and_one_object_can_be_used_again():
    seed(5)
    expected = draw()
    seed(5)
    block = limpet.isolated_rng()
    with block:
        first = draw()
        with block, limpet.isolated_rng(), block:
            second = draw()
            with block:
                draw()
        assert draw() == second != first
    with block:
        assert draw() == expected
    assert draw() == expected


def test_a_decorated_function_is_isolated_also_if_it_calls_itself():
    @limpet.isolated_rng()
    def evaluate(depth, *, scale=1.0):
        """Docstring."""
        own = random.random()
        if depth:
            assert evaluate(depth - 1) != own
        return own * scale

    seed(6)
    expected = draw()
    seed(6)
    assert evaluate(3, scale=2.0) == 2 * evaluate(0)
    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Docstring.")
    assert draw() == expected


def test_a_function_that_would_draw_after_its_call_is_not_decorated():
    def batches():
        yield random.random()

    async def evaluate():
        return random.random()

    async def stream():
        yield random.random()

    for function in (batches, evaluate, stream):
        for same in (function, partial(function)):
            with pytest.raises(LimpetError, match=rf"cannot decorate .*{function.__name__}"):
                limpet.isolated_rng()(same)


def test_suspended_blocks_end_with_the_state_before_the_first():
    """A generator and a coroutine can leave their blocks in another order than they entered."""

    def batches():
        with limpet.isolated_rng():
            yield random.random()

    async def evaluate():
        with limpet.isolated_rng():
            draw()
            await asyncio.sleep(0)
            draw()

    async def both():
        await asyncio.gather(evaluate(), evaluate())

    seed(7)
    expected = draw()
    seed(7)
    first, second = batches(), batches()
    next(first)
    next(second)
    list(first)
    list(second)
    asyncio.run(both())
    assert draw() == expected


def test_a_block_that_ends_in_another_thread_is_refused():
    block, errors = limpet.isolated_rng(), []

    def leave():
        try:
            block.__exit__(None, None, None)
        except LimpetError as e:
            errors.append(e)

    with block:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(20)
    assert "in another thread than it began in" in str(errors)


def test_the_block_of_another_thread_does_not_change_what_a_save_records():
    inside, leave = threading.Event(), threading.Event()

    def evaluate():
        with limpet.isolated_rng():
            inside.set()
            assert leave.wait(20)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert inside.wait(20)
    seed(8)
    store = MemoryStore()
    limpet.save(store, {"rng": limpet.RNG()})
    expected = draw()
    leave.set()
    thread.join(20)
    limpet.load(store, into={"rng": limpet.RNG()})
    assert draw() == expected


@pytest.mark.parametrize("save", [limpet.save, lambda *a: limpet.save_async(*a).wait()])
def test_a_save_in_a_block_records_the_state_at_the_outermost_entry(save):
    store = MemoryStore()
    seed(9)
    with limpet.isolated_rng():
        draw()
        with limpet.isolated_rng():
            draw()
            save(store, {"rng": limpet.RNG()})
            inner = draw()
            limpet.load(store, into={"rng": limpet.RNG()})
            loaded = draw()
    expected = draw()
    assert loaded == expected != inner
    seed(1)
    limpet.load(store, into={"rng": limpet.RNG()})
    assert draw() == expected


def test_a_load_in_a_block_is_undone_with_the_block():
    """To evaluate another version, a program may load its complete state, as loads are strict."""
    store = MemoryStore()
    seed(10)
    limpet.save(store, {"rng": limpet.RNG()})
    seed(11)
    expected = draw()
    seed(11)
    with limpet.isolated_rng():
        limpet.load(store, into={"rng": limpet.RNG()})
    assert draw() == expected


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_block_and_a_save_in_inference_mode(mode):
    store = MemoryStore()
    seed(12)
    with mode(), limpet.isolated_rng():
        draw()
        limpet.save(store, {"rng": limpet.RNG(), "x": torch.rand(3)})
    expected = draw()
    with mode():
        limpet.load(store, into={"rng": limpet.RNG(), "x": torch.rand(3)})
    assert draw() == expected


def test_another_bit_generator_of_numpy():
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        store = MemoryStore()
        limpet.save(store, {"x": Stateful(), "rng": limpet.RNG()})
        with limpet.isolated_rng():
            inside = np.random.normal()
        assert np.random.normal() == inside
        limpet.load(store, into={"x": Stateful(), "rng": limpet.RNG()})
        assert np.random.normal() == inside
    finally:
        np.random.set_bit_generator(original)


class Stateful:
    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        pass


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
def test_a_block_restores_the_generators_of_all_devices(install, count):
    devices, twin = install(count), FakeDevices(count, True)
    devices.draw(), twin.draw()
    with limpet.isolated_rng():
        devices.draw()
        devices.seed_all(5)
    assert devices.draw() == twin.draw()


def test_a_block_does_not_initialize_devices(install):
    install(2, initialized=False)
    with limpet.isolated_rng():
        draw()
    limpet.save(MemoryStore(), {"x": Stateful(), "rng": limpet.RNG()})


@pytest.mark.parametrize("reseed", [False, True])
@pytest.mark.parametrize("own_seed", [None, 77])
@pytest.mark.parametrize("saves", [False, True])
def test_a_device_that_is_first_used_in_a_block(install, reseed, own_seed, saves):
    """It continues as if training had used it first; a save in the block records that."""
    torch.manual_seed(13)
    devices = install(2, initialized=False)
    if own_seed is not None:
        devices.seed_all(own_seed)  # torch.cuda.manual_seed_all before the first use
    twin = FakeDevices(2, True)
    twin.seed_all(13 if own_seed is None else own_seed)
    expected = twin.draw()
    store = MemoryStore()
    with limpet.isolated_rng():
        if reseed and own_seed is None:  # torch.manual_seed seeds the devices too
            torch.manual_seed(14)
            devices.seed_all(14)
        elif reseed:
            torch.manual_seed(14)
        inside = devices.draw()
        if saves:
            limpet.save(store, {"rng": limpet.RNG()})
        assert devices.draw() != inside
    assert devices.draw() == expected
    if saves:
        limpet.load(store, into={"rng": limpet.RNG()})
        assert devices.draw() == expected


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_block_imports_neither_numpy_nor_torch():
    code = (
        "import random, sys, limpet\n"
        "random.seed(1); expected = random.random(); random.seed(1)\n"
        "with limpet.isolated_rng(): random.random()\n"
        "assert random.random() == expected\n"
        "print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])\n"
        "import numpy as np\n"
        "np.random.seed(1); expected = np.random.normal(); np.random.seed(1)\n"
        "with limpet.isolated_rng(): np.random.normal()\n"
        "assert np.random.normal() == expected\n"
        "assert 'torch' not in sys.modules"
    )
    assert run(code) == "[]"


@pytest.mark.slow
def test_libraries_that_are_first_imported_in_a_block():
    """A seed that the block sets for them does not leak, and a save agrees with what follows."""
    code = """
import limpet
with limpet.isolated_rng():
    import numpy as np, torch
    np.random.seed(1); torch.manual_seed(1)
    limpet.save("memory://a/version_1", {"rng": limpet.RNG()})
    np.random.rand(); torch.rand(1)
draws = np.random.rand(), torch.rand(1).item()
limpet.load("memory://a/version_1", into={"rng": limpet.RNG()})
assert draws == (np.random.rand(), torch.rand(1).item())
print(*draws)
"""
    unsaved = """
import limpet
with limpet.isolated_rng():
    import numpy as np, torch
    np.random.seed(1); torch.manual_seed(1)
print(np.random.rand(), torch.rand(1).item())
"""
    for script in (code, unsaved):
        (first, second), seeded = run(script).split(), torch.Generator().manual_seed(1)
        assert float(first) != np.random.RandomState(1).rand()
        assert float(second) != torch.rand(1, generator=seeded).item()
