"""Live arrays that share a part of their memory: a load refuses a snapshot that has different
elements for the same bytes, and changes nothing; equal elements, and interleaved arrays, load."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

import limpet
from limpet.errors import PlanError
from tests.states import assert_same, clone, save_state

RECORD = np.dtype([("x", "<f4"), ("y", "<i8")])


def f32(n=24):
    return torch.zeros(n)


def shared(kind):
    """Return live arrays that share elements of one memory, and what owns it."""
    t, a = f32(), np.zeros(24, np.float32)
    z, r = torch.zeros(6, dtype=torch.complex64), np.zeros(4, RECORD)
    memory, live = {
        "a part": (t, (t, t[5:9])),
        "two parts": (t, (t[:6], t[2:])),
        "same shape": (t, (t[:8], t[4:12])),
        "same elements": (t, (t[:8], t[:8].clone().set_(t[:8]))),
        "transposed": (t, (t.view(4, 6), t.view(4, 6).T)),
        "diagonal": (t, (t.view(4, 6), t.view(4, 6).diagonal())),
        "rows and a column": (t, (*t.view(4, 6), t.view(4, 6)[:, 2])),
        "every second": (t, (t[::2], t[1::3])),
        "another dtype": (t, (t[:8], t.view(torch.int32)[6:10])),
        "bytes": (t, (t[:8], t.view(torch.uint8)[30:40])),
        "a parameter and data": (t, (nn.Parameter(t), t[3:5])),
        "a tensor and an array": (t, (t, t.numpy())),
        "arrays": (a, (a[:6], a[4:])),
        "a reversed array": (a, (a[::-1], a[20:])),
        "a field": (r, (r, r["y"])),
        "records and bytes": (r, (r[1:], r.view(np.uint8)[14:20])),
        "big-endian": (a, (a, a.view(">f4")[3:6])),
        "complex and its real part": (z, (z, z.real)),
        "a conjugate": (z, (z, z[2:4].conj())),
        "a negated view": (z, (z, z.conj().imag)),
        "boxed": (t, (limpet.Boxed(t[:8], (0,), (8,)), t[7:9])),
        "an inner box": (t, (limpet.Boxed(t.view(4, 6)[1:3, 1:3], (2, 2), (4, 4)), t[7:8])),
        "windows": (a, (np.lib.stride_tricks.sliding_window_view(a, 3, writeable=True),)),
        "stride 0": (a, (np.lib.stride_tricks.as_strided(a, (4,), (0,)),)),
    }[kind]
    return {f"k{i}": v for i, v in enumerate(live)}, memory


SHARED = [
    "a part", "two parts", "same shape", "same elements", "transposed", "diagonal",
    "rows and a column", "every second", "another dtype", "bytes", "a parameter and data",
    "a tensor and an array", "arrays", "a reversed array", "a field", "records and bytes",
    "big-endian", "complex and its real part", "a conjugate", "a negated view", "boxed",
    "windows", "stride 0",
]  # fmt: skip


def fill(value, rng):
    """Return a copy of a live value with random elements and memory of its own."""
    if isinstance(value, limpet.Boxed):
        return torch.from_numpy(rng.random(value.shape, np.float32))
    if isinstance(value, torch.Tensor):
        made = torch.from_numpy(rng.integers(1, 100, tuple(value.shape)))
        return made.to(value.dtype) * (2 + 3j if value.is_complex() else 1)
    if value.dtype.names:
        made = np.zeros(value.shape, value.dtype)
        made["x"], made["y"] = rng.random(value.shape), rng.integers(1, 1 << 40, value.shape)
        return made
    return rng.integers(1, 100, value.shape).astype(value.dtype)


def raw(memory):
    return bytes(memory.numpy() if isinstance(memory, torch.Tensor) else memory)


@pytest.mark.parametrize("kind", SHARED)
def test_different_elements_for_one_memory_are_refused(kind):
    live, memory = shared(kind)
    url = save_state(
        {k: fill(v, np.random.default_rng(i)) for i, (k, v) in enumerate(live.items())}
    )
    before = raw(memory)
    with pytest.raises(PlanError, match="share memory, but would get different elements") as e:
        limpet.load(url, into=live)
    assert raw(memory) == before
    assert {*e.value.leaves} <= live.keys()
    assert all(repr(k) in str(e.value) for k in e.value.leaves)
    for k in live if len(live) == 2 else ():
        limpet.load(url, into=live, keys=k)


@pytest.mark.parametrize("kind", SHARED)
def test_equal_elements_of_one_memory_are_loaded(kind, tmp_path):
    live, memory = shared(kind)
    rng = np.random.default_rng(0)
    view = memory.numpy() if isinstance(memory, torch.Tensor) else memory
    view.view(np.uint8)[:] = rng.integers(0, 64, view.nbytes)
    if kind in ("windows", "stride 0"):
        view[:] = 7
    before = raw(memory)
    with limpet.Checkpointer(tmp_path, live, save=limpet.EverySteps(1), quiet=True) as ckpt:
        ckpt.step()
    for again in range(2):
        view.view(np.uint8)[:] = again
        with limpet.Checkpointer(tmp_path, live, quiet=True) as ckpt:
            ckpt.resume()
        if kind == "stride 0":
            assert view[0] == 7
        elif kind not in ("two parts", "same shape", "same elements") and len(live) > 1:
            touched = raw(memory)
            assert sum(a == b for a, b in zip(before, touched, strict=True)) > 8
        saved = limpet.load(f"{tmp_path}@latest")
        for k, v in live.items():
            assert_same(saved[k], v.tensor if isinstance(v, limpet.Boxed) else v, k)


@pytest.mark.parametrize(
    "split",
    [
        lambda t: (t[::2], t[1::2]),
        lambda t: (t.view(4, 6)[:, :2], t.view(4, 6)[:, 2:]),
        lambda t: (*t.view(4, 6).T,),
        lambda t: (t[:12], t[12:]),
        lambda t: (t.view(torch.complex64).real, t.view(torch.complex64).imag),
        lambda t: (t[::2], t[1::2].numpy()),
        lambda t: (t.numpy()[::-2], t.numpy()[::2]),
        lambda t: (t.numpy().view(RECORD)["x"], t.numpy().view(RECORD)["y"]),
        lambda t: (t.as_strided((2, 3), (3, 2)), t[12:]),
        lambda t: (t.view(2, 3, 4).permute(2, 0, 1)[1:3], t.view(6, 4)[:, ::3]),
    ],
)
def test_interleaved_arrays_share_nothing(split):
    live = dict(enumerate(split(f32())))
    saved = {k: fill(v, np.random.default_rng(k)) for k, v in live.items()}
    url = save_state({"x": saved})
    limpet.load(url, into={"x": live})
    assert_same(saved, live)


class Attention(nn.Module):
    def __init__(self, is_shared, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.qkv = nn.Parameter(torch.randn(6, 2))
        self.q = nn.Parameter(self.qkv.data[:2] if is_shared else torch.randn(2, 2))
        self.register_buffer("k", self.qkv.data[2:4] if is_shared else torch.randn(2, 2))


def test_members_of_a_module_and_slots_of_an_optimizer():
    apart, live = Attention(False), Attention(True, 1)
    before = clone(dict(live.state_dict()))
    with pytest.raises(PlanError, match=r"'m/(q|k|qkv)' and 'm/(q|k|qkv)' share"):
        limpet.load(save_state({"m": apart}), into={"m": live})
    assert_same(before, dict(live.state_dict()))
    same, again = Attention(True, 2), Attention(True, 3)
    limpet.load(save_state({"m": same}), into={"m": again})
    assert_same(dict(same.state_dict()), dict(again.state_dict()))
    state = {}
    for name in ("saved", "live"):
        m = nn.Linear(2, 2)
        opt = torch.optim.Adam(m.parameters())
        m(torch.randn(3, 2)).sum().backward()
        opt.step()
        state[name] = {"m": m, "o": opt}
    slots = state["live"]["o"].state[state["live"]["m"].weight]
    slots["exp_avg"] = slots["exp_avg_sq"]
    with pytest.raises(
        PlanError, match=r"m\.weight/exp_avg' and 'o/state/m\.weight/exp_avg_sq' share"
    ):
        limpet.load(save_state(state["saved"]), into=state["live"])


def test_values_that_are_converted_are_compared_after_the_conversion():
    t = torch.zeros(4, dtype=torch.float16)
    a, b = torch.full((4,), 1.0001), torch.full((2,), 1.0)  # equal as float16
    limpet.load(save_state({"a": a, "b": b}), into={"a": t, "b": t[1:3]}, cast=True)
    assert t.tolist() == [1, 1, 1, 1]
    with pytest.raises(PlanError, match="share memory"):
        limpet.load(save_state({"a": a, "b": b + 1}), into={"a": t, "b": t[1:3]}, cast=True)


def test_a_tensor_that_keeps_its_value_is_not_overwritten_by_a_part():
    t = torch.zeros(4)
    url = save_state({"a": torch.ones(4), "b": torch.ones(3)})
    with pytest.raises(PlanError, match=r"'b' and 'a' share|'a' and 'b' share"):
        limpet.load(url, into={"a": t, "b": t[1:3]}, mismatched="keep")
    assert t.tolist() == [0, 0, 0, 0]
    t.fill_(1)
    assert limpet.load(url, into={"a": t, "b": t[1:3]}, mismatched="keep").kept
    both = limpet.load(url, into={"a": t[:2], "b": t[:2]}, mismatched="keep")
    assert [*both.kept] == ["a", "b"]


def test_many_views_are_compared_at_once(monkeypatch):
    """The cost grows with the views, not with their pairs; arrays that share nothing cost none."""
    table = torch.arange(3_000.0)
    live = {"table": table, "rows": [*table.view(1_000, 3)], "windows": [*table.unfold(0, 3, 1)]}
    url = save_state(live)
    calls = []
    read = limpet.snapshot.reader.SnapshotReader.read
    monkeypatch.setattr(
        limpet.snapshot.reader.SnapshotReader,
        "read",
        lambda self, requests, *a, **k: (
            calls.append(len(requests)),
            read(self, requests, *a, **k),
        ),
    )
    table.zero_()
    limpet.load(url, into=live)
    assert table.tolist() == [*range(3_000)]
    assert calls == [2_999, 3_999]  # the tied ones once
    limpet.load(url, into={**live, "windows": []}, keys="rows/**")
    assert calls[2:] == [1_000]


@pytest.mark.parametrize("order", [*permutations("abc")])
def test_the_order_of_the_views_does_not_matter(order):
    t = torch.zeros(10)
    views = {"a": t[:4], "b": t[3:7], "c": t[6:]}
    url = save_state({"a": torch.ones(4), "b": torch.ones(4), "c": torch.full((4,), 2.0)})
    with pytest.raises(PlanError, match=r"'b' and 'c' share memory"):
        limpet.load(url, into={k: views[k] for k in order})
    assert not t.any()
