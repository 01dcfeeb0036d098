"""Every kind of value is refused by a save, or kept with its type and its bits: without a live
state, in a live state, and by a run."""

import collections
import datetime
import decimal
import enum
import functools
import itertools
import mmap
import pathlib
import struct
from collections import Counter, OrderedDict
from math import inf, nan

import numpy as np
import pytest
import torch
from numpy._core._rational_tests import rational
from torch import nn

import limpet
from limpet.errors import ManifestInvalid, PlanError, Unsupported
from limpet.format import tree
from limpet.state import composites
from tests.states import DTYPE_NAMES, assert_same, random_tensor, save_state

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse",
    "ignore:ComplexHalf",
    "ignore:.*prototype stage",
    "ignore:.*deprecated",
    "ignore:The given",
)

PAYLOAD, SIGNALING = (
    struct.unpack("<d", struct.pack("<Q", bits))[0]
    for bits in (0x7FF8_0000_0000_0123, 0xFFF0_0000_0000_0001)
)
Point = collections.namedtuple("Point", "a b")
Color = enum.Enum("Color", "RED")
Level = enum.IntEnum("Level", "LOW")
RECORD = [("a", "<i4"), ("b", "S3")]
OFFSETS = np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [4], "itemsize": 16})
OVERLAPPING = {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]}


def sparse_tensors():
    dense = torch.zeros(6, 8)
    dense[1, 2], dense[4, 7], dense[5, 0] = 1.5, float("nan"), -0.0
    dense[0, 0] = 3
    coo = torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 0]], [1.0, 2.0, 3.0], (3, 4))
    return {
        "coo": coo,
        "coalesced": coo.coalesce(),
        "hybrid": torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 3, 2), (4, 3, 2)),
        "empty": torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), [], (3, 4)),
        "complex": coo.to(torch.complex64),
        "bf16": coo.to(torch.bfloat16),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((3, 4)),
    }


RECORD_DTYPE = np.dtype(
    [("id", ">u4"), ("at", "<M8[ms]"), ("box", "f4", (2, 3)), ("in", [("x", "i2"), ("s", "U3")])]
)


def arrays():
    r = np.zeros(3, RECORD_DTYPE)
    r["id"], r["box"], r["in"]["s"] = [1, 2, 3], np.arange(18).reshape(3, 2, 3), ["a", "é", ""]
    r["at"] = np.datetime64("2024-02-29T12:00:00.123")
    made = {
        "0-d": np.array(3.5),
        "empty": np.empty((0, 5), np.float32),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "strided": np.arange(24).reshape(4, 6)[::2, ::-3],
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "big": np.arange(5, dtype=">i4"),
        "big float": np.array([1.5, np.nan, -0.0], ">f8"),
        "longdouble": np.array([1, 2], np.longdouble) / 3,
        "clongdouble": np.array([1j, 2], np.clongdouble) / 3,
        "time": np.array(["2024-01-01", "NaT"], "M8[D]"),
        "time of 25": np.array([1, 2], "M8[25s]"),
        "time of none": np.array(["NaT"], "M8"),
        "delta": np.array([1, -1], "m8[us]"),
        "text": np.array(["a", "längere", ""]),
        "no text": np.array([""]),
        "bytes": np.array([b"a", b"\x00\xff"], "S4"),
        "void": np.array([b"abc"], "V3"),
        "record": r,
        "record 0-d": r[1:2].reshape(()),
        "no records": r[:0],
        "aligned": np.ones(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "part of a record": r[["id", "in"]],
        "bool": np.array([True, False]),
    }
    names = ["f2", "f4", "f8", "c8", "c16"] + [f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8)]
    return made | {n: (np.arange(6) - 1).astype(n).reshape(2, 3) for n in names}


def plain_values():
    return {
        "none": None,
        "bools": [True, False, 1, 0],
        "ints": [0, -1, 2**31, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**100, -(2**100)],
        "long": 1 << 20000,
        "floats": [0.0, -0.0, 1.0, 1e300, 5e-324, 0.1, 1e22, 2.0**53],
        "not finite": [float("nan"), float("inf"), float("-inf")],
        "complex": [1j, complex(-0.0, float("nan")), complex(float("inf"), -0.0)],
        "text": ["", "é\U0001f600\x00\n\u2028", "~1/~0", "x" * 5000],
        "bytes": [b"", b"\x00\xff", bytes(range(256)), b"y" * 4095, b"y" * 4096, b"z" * 100_000],
        "bytearrays": [bytearray(), bytearray(b"abc"), bytearray(b"z" * 100_000)],
        "tuple": (1, (2.0, ()), [], {}),
        "one": (1,),
        "set": {1, "a", (1, 2), None, 2.5, b"x", frozenset({1})},
        "frozenset": frozenset({"a", "b"}),
        "empty": [set(), frozenset(), {}, OrderedDict(), Counter(), [], ()],
        "ordered": OrderedDict([("b", 1), ("a", [2])]),
        "ordered by ints": OrderedDict([(2, 1), (1, 2)]),
        "counter": Counter({30: 2, 80: 1}),
        "deep": functools.reduce(lambda x, _: [x], range(80), 1),
    }


def named_by_other_types():
    return {
        1: "int",
        "1": "text",
        1.5: "float",
        None: "none",
        "None": "text",
        (1, 2): torch.ones(1),
        "(1, 2)": torch.zeros(1),
        (1, ("a", None)): 5,
        b"1": "bytes",
        frozenset({"a", "b", "c"}): torch.full((1,), 3.0),
        2**70: "long",
        np.float64(0.25): "numpy",
        (np.float32(0.5), np.str_("a")): torch.full((1,), 2.0),
        np.float32(0.5): "numpy",
        "": torch.full((1,), 4.0),
        "/": 1,
        "~": 2,
        "a/b": torch.full((1,), 5.0),
        "a~1b": torch.full((1,), 6.0),
        "~2": 3,
        "..": 4,
        "\x00": 5,
        "__metadata__": torch.full((1,), 7.0),
        "k" * 4096: torch.full((1,), 8.0),
    }


def rows(crow, col, values, size, make=torch.sparse_csr_tensor):
    return make(*map(torch.tensor, (crow, col)), torch.tensor(values), size)


def coo(indices, values, size):
    return torch.sparse_coo_tensor(indices, values, size)


SPARSE = ["coo", "coalesced", "hybrid", "empty", "complex", "bf16", "csr", "csc", "bsr", "bsc"]
SCALARS = [
    np.bool_(True), np.float32(0.1), np.float16("nan"), np.float64(-0.0), np.zeros(1, "g")[0],
    np.zeros(1, "G")[0], np.complex64(1 + 2j), np.int8(-5), np.uint64(2**64 - 1),
    np.datetime64("2024-01-01T00:00:01", "ns"), np.timedelta64(-3, "h"), np.str_("text é"),
    np.str_(""), np.bytes_(b"a\xff"), np.bytes_(b""), np.void(b"raw"), np.void(b""),
    arrays()["record"][1],
]  # fmt: skip
KEPT = {
    "nan": lambda: nan,
    "negative nan": lambda: -nan,
    "payload": lambda: PAYLOAD,
    "signaling": lambda: [SIGNALING, {"x": SIGNALING}],
    "complex": lambda: complex(-0.0, -nan),
    "complex payload": lambda: complex(PAYLOAD, inf),
    "set of nan": lambda: {nan, float("nan"), PAYLOAD, (PAYLOAD,), np.float32("nan")},
    "frozenset": lambda: frozenset({frozenset({nan}), PAYLOAD}),
    "NumPy's names": lambda: {np.int64(3): 1, np.str_("a\0"): 2, np.timedelta64(1, "s"): 3},
    "np.str_": lambda: np.str_("a\0\0"),
    "np.str_ of NUL": lambda: np.str_("\0"),
    "np.str_ surrogate": lambda: np.str_("\ud800\0"),
    "np.bytes_": lambda: np.bytes_(b"a\0"),
    "np.void": lambda: np.void(b"ab\0"),
    "np.float16 nan": lambda: np.uint16(0x7E01).view(np.float16),
    "np.float32 nan": lambda: np.uint32(0xFF800001).view(np.float32),
    "np.datetime64": lambda: np.datetime64("2020-01-01T00:00:00.1", "25us"),
    "NaT": lambda: np.datetime64("NaT"),
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cuda", 1),
    "Size": lambda: torch.Size([2, 3]),
    "array of records": lambda: np.array([(1, b"a\0"), (2, b"")], RECORD),
    "array with offsets": lambda: np.array([(3,)], OFFSETS),
    "array of text": lambda: np.array(["a\0", "b"]),
    "array of nothing": lambda: np.zeros(3, "V0"),
    "array read-only bytes": lambda: np.broadcast_to(np.array([b"ab"]), (2, 1)),
    "tensor 0-d": lambda: torch.tensor(SIGNALING, dtype=torch.float64),
    "tensor empty": lambda: torch.empty(0, 3),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "conjugate": lambda: torch.tensor([1 + 2j, complex(-0.0, nan)]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "subnormal": lambda: torch.full((3,), 1e-45),
    "COO": lambda: coo([[0, 1]], [-0.0, nan], (3,)),
    "COO scalar": lambda: coo(torch.empty(0, 2, dtype=torch.int64), torch.ones(2), ()),
    "CSR unsorted": lambda: rows([0, 2, 2], [1, 0], [1.0, 2.0], (2, 2)),
    "CSR duplicates": lambda: rows([0, 2, 2], [1, 1], [1.0, 2.0], (2, 2)),
    "CSR int32": lambda: torch.sparse_csr_tensor(
        *(torch.tensor(i, dtype=torch.int32) for i in ([0, 2, 2], [1, 0])), torch.ones(2), (2, 2)
    ),
    "CSR batches": lambda: rows(
        [[0, 2, 2], [0, 1, 2]], [[1, 0], [0, 1]], [[1.0, 2.0], [3.0, 4.0]], (2, 2, 2)
    ),
    "CSR hybrid": lambda: rows([0, 2, 2], [1, 0], [[1.0, 2.0], [3.0, 4.0]], (2, 2, 2)),
    "CSR empty": lambda: torch.zeros(2, 3).to_sparse_csr(),
    "CSC unsorted": lambda: rows([0, 2, 2], [1, 0], [True, False], (2, 2), torch.sparse_csc_tensor),
    "BSR unsorted": lambda: rows(
        [0, 2, 2], [2, 0], torch.ones(2, 2, 1).tolist(), (4, 3), torch.sparse_bsr_tensor
    ),
    "BSC unsorted": lambda: rows(
        [0, 2, 2], [2, 0], torch.ones(2, 1, 2).tolist(), (3, 4), torch.sparse_bsc_tensor
    ),
    **{name: lambda d=name: random_tensor(getattr(torch, d), (2, 3)) for name in DTYPE_NAMES},
    **{f"array {name}": lambda n=name: arrays()[n] for name in arrays()},
    **{f"sparse {name}": lambda n=name: sparse_tensors()[n] for name in SPARSE},
    **{f"plain {name}": lambda n=name: plain_values()[n] for name in plain_values()},
    "named by other types": named_by_other_types,
    "named by bools": lambda: {True: 1, 0: 2},
    "scalars": lambda: SCALARS,
}
REFUSED = {
    **{
        f"subclass of {value!r}": lambda v=value: type("Sub", (type(v),), {})(v)
        for value in (3, 1.0, "a", [], (), {}, set(), b"a", collections.OrderedDict())
    },
    "defaultdict": lambda: collections.defaultdict(int),
    "deque": lambda: collections.deque([1]),
    "datetime": lambda: datetime.datetime(2026, 1, 2),
    "date": lambda: datetime.date(2026, 1, 2),
    "timedelta": lambda: datetime.timedelta(1),
    "function": lambda: len,
    "iterator": lambda: iter([1]),
    "memoryview": lambda: memoryview(b"abc"),
    "class": lambda: nn.Linear,
    "NotImplemented": lambda: NotImplemented,
    "a name of an enum": lambda: {Color.RED: 1},
    "a name of an IntEnum": lambda: {Level.LOW: 1},
    "a name of a namedtuple": lambda: {Point(1, 2): 1},
    "a name of a class": lambda: {int: 1},
    "a member of an enum": lambda: {Color.RED},
    "a name with surrogates": lambda: {"a\ud800": 1, "\udc00b": 2},
    "a member with surrogates": lambda: {"\ud800"},
    "path": lambda: pathlib.PurePosixPath("x"),
    "decimal": lambda: decimal.Decimal(1),
    "enum": lambda: Color.RED,
    "IntEnum": lambda: Level.LOW,
    "namedtuple": lambda: Point(1, 2),
    "range": lambda: range(3),
    "slice": lambda: slice(3),
    "Ellipsis": lambda: ...,
    "layout": lambda: torch.strided,
    "memory format": lambda: torch.channels_last,
    "np.dtype": lambda: np.dtype("f4"),
    "text with surrogates": lambda: "\ud800",
    "a name NaN": lambda: {nan: 1},
    "a name of NumPy's NaN": lambda: {np.float32("nan"): torch.ones(2)},
    "a name NaT": lambda: {np.datetime64("NaT"): 1},
    "a name with NaN in it": lambda: collections.OrderedDict({(1, (2, nan)): 1}),
    "a counted NaN": lambda: collections.Counter([frozenset({complex(0, nan)})]),
    "a name of a type": lambda: {torch.float32: 1},
    "a long name": lambda: {b"x" * 5000: 1},
    "array of objects": lambda: np.array([None]),
    "array of strings": lambda: np.array(["a"], np.dtypes.StringDType()),
    "array of another package": lambda: np.array([rational(1, 2)]),
    "scalar of another package": lambda: rational(1, 2),
    "records of another package": lambda: np.zeros(2, [("a", rational)]),
    "records of objects": lambda: np.zeros(2, [("a", "O")])[0],
    "overlapping fields": lambda: np.zeros(2, np.dtype(OVERLAPPING)),
    "recarray": lambda: np.rec.array([(1, 2)]),
    "np.record": lambda: np.rec.array([(1, 2)], dtype=[("a", "<i4"), ("b", "<i4")])[0],
    "masked array": lambda: np.ma.array([1]),
    "dtype with metadata": lambda: np.zeros(2, np.dtype("f4", metadata={"a": 1})),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.empty(2, device="meta"),
    "without memory": lambda: torch._efficientzerotensor(3),
    "opaque": lambda: torch.ones(2, 2).to_mkldnn(),
    "COO out of bounds": lambda: coo(torch.tensor([[0, 7]]), torch.ones(2), (3,)),
    "COO negative": lambda: coo(torch.tensor([[0, -1]]), torch.ones(2), (3,)),
    "CSR out of bounds": lambda: rows([0, 2, 2], [1, 5], [1.0, 2.0], (2, 2)),
    "CSR negative": lambda: rows([0, 2, 2], [1, -1], [1.0, 2.0], (2, 2)),
    "CSR decreasing": lambda: rows([0, 2, 1], [1, 0], [1.0, 2.0], (2, 2)),
    "CSR too full": lambda: rows([0, 3, 3], [1, 1, 0], [1.0, 2.0, 3.0], (2, 2)),
    "BSR out of bounds": lambda: rows(
        [0, 2, 2], [2, 0], torch.ones(2, 2, 2).tolist(), (4, 4), torch.sparse_bsr_tensor
    ),
    "too many dimensions": lambda: torch.zeros([1] * 65),
    "too many rows": lambda: np.zeros([1] * 64, ">i4"),
    "matrix": lambda: np.ones((1, 2)).view(np.matrix),
    "inner metadata": lambda: np.zeros(2, [("a", np.dtype("f8", metadata={"a": 1}), (2,))]),
    "uint4": lambda: torch.empty(4, dtype=torch.uint4),
    "subclass": lambda: torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
    "meta parameter": lambda: nn.Parameter(torch.empty(3, device="meta")),
    "generator": torch.Generator,
    "storage": lambda: torch.ones(2).untyped_storage(),
    "uninitialized": nn.UninitializedParameter,
}


def live(value):
    """Return a live value of the same kind, with other elements if a load fills it in place."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return torch.zeros_like(value.detach().resolve_conj().resolve_neg())
    return np.zeros_like(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("kind", KEPT)
def test_a_value_keeps_its_type_and_bits(kind):
    make = KEPT[kind]
    saved, own = {"x": make(), "in": [{"x": make()}]}, make()
    url = save_state({**saved, "each": limpet.PerRank(own)})
    assert_same({**saved, "each": {"0": own}}, limpet.load(url))
    for start in (live, lambda _: None):
        new = {"x": start(make()), "in": [{"x": start(make())}]}
        state = {**new, "each": limpet.PerRank(start(make()))}
        limpet.load(url, into=state)
        each = state.pop("each").value
        assert_same({**saved, "each": own}, {**state, "each": each})
        if getattr(new["x"], "layout", None) is torch.strided or type(new["x"]) is np.ndarray:
            assert state["x"] is new["x"]


@pytest.mark.parametrize("start", [live, lambda _: None])
def test_a_run_keeps_all_of_them(start, tmp_path):
    saved = {kind: make() for kind, make in KEPT.items()}
    with limpet.Checkpointer(tmp_path, saved, save=limpet.EverySteps(1), quiet=True) as ckpt:
        for _ in range(2):
            ckpt.step()
    state = {kind: start(make()) for kind, make in KEPT.items()}
    with limpet.Checkpointer(tmp_path, state, quiet=True) as ckpt:
        assert ckpt.resume() is not None
    assert_same(saved, state)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_would_change_is_refused(kind):
    make = REFUSED[kind]
    for state, leaf in (({"x": make()}, "x"), ({"a": [{"x": make()}]}, "a/0/x")):
        with pytest.raises(Unsupported, match="cannot be saved faithfully") as e:
            limpet.save("memory://refused/version_1", state)
        assert e.value.leaf.startswith(leaf)
        assert e.value.todo


def test_a_run_refuses_all_of_them(tmp_path):
    state = {kind.replace(" ", ""): make() for kind, make in REFUSED.items()}
    with (
        pytest.raises(Unsupported, match=f"{len(state)} values of the state") as e,
        limpet.Checkpointer(tmp_path, state, save=limpet.EverySteps(1)) as ckpt,
    ):
        ckpt.step()
    assert {leaf.partition("/")[0] for leaf in e.value.leaves} == state.keys()
    assert not [*tmp_path.glob("version_*")]


def test_a_dtype_of_another_package_is_not_taken_for_one_of_numpy(monkeypatch):
    """As of ml_dtypes, of which one has the character of uint64, and others have names of torch."""
    from limpet.state.arrays import numpy as numpy_arrays

    monkeypatch.setitem(numpy_arrays._NAMES, np.dtype(rational).char, "uint64")
    for value in (np.array([rational(1, 2)]), np.zeros((0, 2), rational)):
        with pytest.raises(Unsupported, match=r'rational.*Save array\.view\("u8"\)'):
            limpet.save("memory://other/version_1", {"x": value})
    url = save_state({"x": np.arange(2, dtype=np.uint64)})
    with pytest.raises(limpet.errors.DTypeMismatch, match=r"uint64, live dtype\(rational\)"):
        limpet.load(url, into={"x": np.array([rational(1, 2)] * 2)})


def read_only(tmp_path):
    """Return tensors in memory that the process may only read."""
    path = tmp_path / "data"
    np.arange(4096, dtype=np.float32).tofile(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    of_memmap = torch.from_numpy(np.memmap(path, np.float32, "r"))
    return {
        "memmap": of_memmap,
        "part": of_memmap[8:12],
        "last": of_memmap[-1:],
        "mmap": torch.frombuffer(mapped, dtype=torch.int16)[4:],
        "view": of_memmap.view(64, 64).T,
        "array": np.lib.stride_tricks.as_strided(of_memmap.numpy(), (5,), (8,)),
    }


@pytest.mark.parametrize("kind", ["memmap", "part", "last", "mmap", "view", "array"])
def test_read_only_memory_is_refused_and_does_not_end_the_process(kind, tmp_path):
    value = read_only(tmp_path)[kind]
    state = {"x": value}
    url = save_state(state)
    assert_same(state, limpet.load(url))
    with pytest.raises(PlanError, match="'x' is in memory that this process may only read"):
        limpet.load(url, into=state)
    if isinstance(value, np.ndarray):
        return
    module = nn.Linear(2, 2)
    module.register_buffer("table", value)
    for wrong, name in ((state, "x"), ({"m": module}, "m.table")):
        with (
            pytest.raises(PlanError, match=rf"{name} in the state.*or the memory is read-only"),
            limpet.Checkpointer(tmp_path / "run", wrong, quiet=True) as ckpt,
        ):
            ckpt.step()


def test_memory_mapped_for_writing_is_filled(tmp_path):
    torch.save({"t": torch.ones(3000)}, tmp_path / "t.pt")
    np.zeros(3000, np.float32).tofile(tmp_path / "f")
    array = np.memmap(tmp_path / "f", np.float32, "r+")
    state = {
        "private": torch.load(tmp_path / "t.pt", mmap=True)["t"],
        "file": torch.from_file(str(tmp_path / "f"), shared=False, size=3000),
        "shared": torch.from_numpy(array),
        "array": np.memmap(tmp_path / "f", np.float32, "r").view(np.ndarray),
    }
    saved = {k: random_tensor(torch.float32, (3000,), i) for i, k in enumerate(state)}
    saved["array"] = saved["array"].numpy()
    limpet.load(save_state(saved), into=state)
    assert_same(saved, state)
    assert array.tobytes() == saved["shared"].numpy().tobytes()


def test_every_pair_of_names_is_kept():
    """Equal names in NumPy's and Python's types are one name; texts may be equal."""
    names = [1, "1", 1.5, "1.5", None, "None", (1,), "(1,)", b"1", "b'1'", np.str_("a\0"), "a", -1j]
    for pair in itertools.permutations(names, 2):
        saved = {"x": {n: torch.tensor([i]) for i, n in enumerate(pair)}}
        state = {"x": {n: torch.tensor([9]) for n in pair[::-1]}}
        url = save_state(saved)
        assert_same(saved, limpet.load(url))
        limpet.load(url, into=state)
        assert [state["x"][n].item() for n in pair] == [0, 1]


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("crow", "col", "layout"),
    [
        (ints(0, 1 << 60, 2), ints(0, 1), "sparse_csr"),
        (ints(-(1 << 60), 2, 2), ints(0, 1), "sparse_csr"),
        (ints(1 << 62, -(1 << 62), 2), ints(0, 1), "sparse_csr"),
        (ints(0, 2, 1 << 60), ints(0, 1), "sparse_csr"),
        (ints(0, 2), ints(0, 1), "sparse_csr"),
        (ints(), ints(0, 1), "sparse_csr"),
        (torch.tensor(0), ints(0, 1), "sparse_csr"),
        (ints(0, 2, 2), torch.tensor(0), "sparse_csr"),
        (ints(0, 2, 2), ints(1, 0, 0), "sparse_csr"),
        (ints(0, 2, 2), ints(1, 0).float(), "sparse_csr"),
        (ints(0, 2, 2).int(), ints(1, 0), "sparse_csr"),
        (ints(0, 2, 2), ints(1, 0), "sparse_bsr"),
        (ints(0, 2, 2), ints(1, 1 << 60), "sparse_csc"),
    ],
)
def test_parts_from_outside_are_checked_before_memory_is_allocated_for_them(crow, col, layout):
    names = ("ccol", "row") if layout == "sparse_csc" else ("crow", "col")
    parts = {**dict(zip(names, (crow, col), strict=True)), "values": torch.ones(2)}
    with pytest.raises(composites.BAD_PARTS):
        composites.make_sparse({"layout": layout, "shape": [2, 2]}, parts)


@pytest.mark.parametrize(
    "body",
    [
        *("", "NaN", "7ff8000000000000", "3ff0000000000000", "7FF8000000000123", "7ff80000000001"),
        *("7ff8000000000123 ", "7ff0000000000000", "-nan", None, 1, ["nan"]),
    ],
)
def test_other_bits_are_no_node_of_a_float(body):
    with pytest.raises(ManifestInvalid):
        tree.decode({"float": body}, "x", tree.reject_leaf)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_the_indices_of_a_sparse_tensor_are_checked_when_they_have_changed(layout, monkeypatch):
    checks = []
    make = composites.make_sparse
    monkeypatch.setattr(composites, "make_sparse", lambda *parts: checks.append(1) or make(*parts))
    module = nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse(layout=getattr(torch, layout)))
    graph = module.graph
    for _ in range(3):
        save_state({"m": module, "t": graph})
    assert len(checks) == 1
    indices = graph._indices() if layout == "sparse_coo" else graph.col_indices()
    indices.fill_(5)
    with pytest.raises(Unsupported, match="no load could create it"):
        save_state({"m": module})
    indices.fill_(0)
    save_state({"m": module})
    module.graph = (torch.eye(4) * 2).to_sparse(layout=getattr(torch, layout))
    save_state({"m": module})
    assert len(checks) == 4
