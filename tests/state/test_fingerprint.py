"""Fingerprints of tensors, which detect changes that PyTorch does not count."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limpet.state.savepoint import Fingerprint
from tests.states import TORCH_DTYPES, random_tensor


@pytest.fixture(params=["cpu", "device"])
def make(request, monkeypatch):
    """Return a function that makes a fingerprint of CPU tensors. It samples them either as CPU
    tensors or as tensors on an accelerator."""

    def made(tensors):
        found = Fingerprint(tensors)
        if request.param == "device":
            found._cpu_windows, found._device_tensors = [], [t for t in tensors if not t.is_conj()]
        found.record()
        return found

    return made


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "one": lambda t: t[0, 0],
    "part": lambda t: t[2:5],
    "transposed": lambda t: t.t(),
    "gaps": lambda t: t[1:, 1:3],
    "column": lambda t: t[:, 1],
    "expanded": lambda t: t[0, :1].expand(5),
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_only_changes_of_the_fingerprinted_elements_are_detected(make, dtype):
    whole = random_tensor(dtype, (16, 12))
    raw = whole.view(torch.uint8)
    before = raw.clone()
    numbers = torch.arange(16 * 12).view(16, 12)
    for name, shape in SHAPES.items():
        raw.copy_(before)
        part = shape(whole)
        found = make([part, part])
        assert not found.has_changed(), name
        inside = torch.zeros(16 * 12, dtype=torch.bool)
        inside[shape(numbers).reshape(-1)] = True
        inside = inside.view(16, 12).repeat_interleave(whole.element_size(), 1)
        raw.copy_(torch.where(inside, before, ~before))
        assert not found.has_changed(), name
        raw.copy_(torch.where(inside, ~before, before))
        assert found.has_changed() == (part.numel() > 0), name
        found.record()
        assert not found.has_changed(), name


@given(st.integers(1, 3000), st.data())
def test_changes_at_the_beginning_middle_and_end_are_detected(n, data):
    tensors = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
    found = Fingerprint(tensors)
    found.record()
    at = data.draw(st.sampled_from([*range(min(n, 64)), n // 2, n - 1]))
    tensors[1].data[at] = 1
    assert found.has_changed()


def test_a_fingerprint_keeps_no_tensor_memory_alive(make):
    memory = np.zeros(100)
    t = torch.nn.Parameter(torch.from_numpy(memory))
    found = make([t])
    old = weakref.ref(memory)
    del memory
    t.data = torch.zeros(100)
    gc.collect()
    assert found is not None
    assert old() is None


def test_an_unchanged_nan_is_no_change(make):
    t = torch.full((50,), torch.nan)
    found = make([t])
    assert not found.has_changed()
    t.data[25] = -t[25]
    assert found.has_changed()
