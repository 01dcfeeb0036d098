"""States to save, and comparisons of a saved state with the loaded one."""

import struct
from collections import Counter, OrderedDict
from itertools import count

import numpy as np
import torch

import limpet

_url_numbers = count()

DTYPE_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
]
TORCH_DTYPES = [getattr(torch, name) for name in DTYPE_NAMES]


class Stateful:
    """An object with a state that it saves and loads without a check."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def unused_url():
    """Return the URL of a memory store that no other test uses."""
    return f"memory://state{next(_url_numbers)}/version_1"


def round_trip(state, target=None):
    """Save the state, and return what a plain load returns."""
    target = target or unused_url()
    limpet.save(target, state)
    return limpet.load(target)


def save_state(state, target=None):
    """Save the state, and return the location."""
    target = target or unused_url()
    limpet.save(target, state)
    return target


def random_tensor(dtype, shape, seed=0):
    """Return a tensor with random bits. These may include NaNs with payloads."""
    raw = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (*shape, dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return raw.view(dtype).reshape(shape)


def tensor_bytes(t):
    """Return the bits of a strided tensor in row-major order, for every dtype, stride, and view."""
    t = t.detach().resolve_conj().resolve_neg().cpu()
    out = bytearray()
    plain = torch.empty(t.shape, dtype=t.dtype)
    try:
        plain.copy_(t)
    except (RuntimeError, NotImplementedError):
        plain = t.contiguous()
    if plain.numel():
        out += bytes(plain.reshape(-1).view(torch.uint8).numpy())
    return bytes(out)


def assert_same(a, b, path="state"):
    """Assert that two states are bit-identical, including types, order, and keys."""
    torch_types = (torch.Tensor, torch.nn.Parameter)
    if isinstance(a, torch_types):
        assert_same_tensor(a, b, path)
        return
    assert type(a) is type(b), path
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if a.dtype.names and a.ndim:  # padding between the fields is not compared
            for name in a.dtype.names:
                assert_same(a[name], b[name], f"{path}.{name}")
            return
        assert a.tobytes() == b.tobytes(), path
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype, path
        assert a.tobytes() == b.tobytes(), path
    elif isinstance(a, dict | OrderedDict | Counter):
        assert [*map(_member_repr, a)] == [*map(_member_repr, b)], path
        for k, x, y in zip(a, a.values(), b.values(), strict=True):
            assert_same(x, y, f"{path}[{k!r}]")
        assert_same(
            getattr(a, "_metadata", None), getattr(b, "_metadata", None), f"{path}._metadata"
        )
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b), path
    elif isinstance(a, complex):
        assert_same([a.real, a.imag], [b.real, b.imag], path)
    elif isinstance(a, set | frozenset):
        assert sorted(map(_member_repr, a)) == sorted(map(_member_repr, b)), path
    else:
        assert a == b, path


def _member_repr(value):
    """Return text for a member of a set: equal for two NaN, different for -0.0 and 0.0."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_member_repr, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_member_repr, value))})"
    return f"{type(value).__name__} {value!r}"


def assert_same_tensor(a, b, path="tensor"):
    assert isinstance(b, torch.Tensor), path
    assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), path
    if a.layout is torch.strided:
        assert tensor_bytes(a) == tensor_bytes(b), path
        return
    if a.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced(), path
        parts = [torch.Tensor._indices, torch.Tensor._values]
    elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values]
    else:
        parts = [torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values]
    for part in parts:
        assert_same_tensor(part(a.detach()), part(b.detach()), f"{path}.{part.__name__}")


def clone(state):
    """Return a deep copy, which shares no memory with the original."""
    import copy

    return copy.deepcopy(state)
