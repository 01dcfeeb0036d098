"""Create the golden files: ``python -m tests.golden.make tests/golden/format-1``.

``branches`` is a small run with a branch, and with every kind of node and every dtype. ``chain``
has incremental versions, and ``spread`` spreads its shards over 16 folders.

The first release freezes format 1. From then on, the files are never created again, and the values
of ``state`` never change, because later builds must read the files that earlier builds wrote. A new
format number gets a new folder.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from math import inf, nan
from typing import Any

import numpy as np
import torch

import limpet
from limpet.buffers import shared_pool
from limpet.format.names import Version
from limpet.run.policy import EverySteps
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.storage.open import open_store
from tests.spread_stores import spread_over

DTYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64"
    " complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
    " float8_e8m0fnu float4_e2m1fn_x2"
)


def tensor(dtype: str) -> torch.Tensor:
    """Return a 2 x 3 tensor whose bytes count up from 0."""
    torch_dtype = getattr(torch, dtype)
    count = 6 * torch.empty((), dtype=torch_dtype).element_size()
    raw = torch.arange(count, dtype=torch.uint8) % 2 if dtype == "bool" else torch.arange(count)
    return raw.to(torch.uint8).view(torch_dtype).view(2, 3)


def state(step: int) -> dict[str, Any]:
    """Return the state after ``step`` steps. All of its arithmetic is exact."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
        model.bias.fill_(0.25)
    for _ in range(step):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    progress = limpet.Progress()
    progress.step = step
    return {
        "progress": progress,
        "model": model,
        "optimizer": optimizer,
        "dtypes": {d: tensor(d) for d in DTYPES.split()},
        "tied": [model.weight.detach()],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(step)),
        "sparse": {
            "coo": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
            "csr": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(),
        },
        "arrays": {
            "native": np.arange(step, step + 3, dtype=np.int16),
            "big": np.arange(3, dtype=">u4"),
            "dates": np.array(["2026-01-01"], "M8[s]"),
            "records": np.array([(1, (2.5, 3.5), b"x")], "<i4, (2,)<f8, S3"),
        },
        "blob": bytes(range(256)) * 17,
        "types": {
            "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.quint8],
            "devices": (torch.device("cpu"), torch.device("cuda:0"), torch.device("meta")),
            "sizes": {"some": torch.Size([2, 3]), "none": torch.Size([])},
        },
        "scaled": scaled(step),
        "nested": [Scaled(scaled(step), torch.ones(2, 1), 4)],
        "plain": plain(step),
    }


def plain(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "none": None,
        "flags": [True, False],
        "integers": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**100)],
        "floats": [0.1, -0.0, 1e300, 5e-324, inf, -inf],
        "nan": nan,
        "texts": ["", "ü", "\0", "\U0001fab8", "/~"],
        "complex": complex(1.5, -inf),
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"x"),
        "numpy": [np.float32(1.5), np.int8(-1), np.bool_(True), np.str_("x"), np.bytes_(b"")],
        "tuple": (1, ("x", []), ()),
        "set": {1, "a", (2, 3)},
        "frozenset": frozenset({b"k"}),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "keys": {1: "integer", "1": "text", (1, 2): "tuple", None: 0, b"k": 1, 2.5: 2},
        "names": {"": {"": 1}, "..": 2, "a/b": {"~": 3}, "\0": 4, "__metadata__": 5},
    }


def make_branches(url: str) -> None:
    """Save versions 1 and 2, then resume from version 1, on branch 1, and train up to step 3."""
    for start, stop in ((0, 2), (1, 3)):
        live = state(start)
        with limpet.Checkpointer(url, live, save=EverySteps(1)) as ckpt:
            ckpt.resume(at=start or None)
            for step in range(start + 1, stop + 1):
                live.update({k: v for k, v in state(step).items() if k != "progress"})
                ckpt.step({"loss": 1 / step})
                ckpt.wait()


def with_frozen(step: int) -> dict[str, Any]:
    """Return the state with two more arrays that rarely or never change."""
    frozen = np.arange(33_000, dtype=np.int16)
    frozen[:4] = step // 3
    return {**state(step), "frozen": frozen, "more": np.arange(9_000.0)}


def make_chain(url: str) -> None:
    """Save four versions. Version 1 is full, and versions 2 and 3 refer to it.

    Version 4 refers to versions 1 and 3, because ``frozen`` changed at step 3.
    """
    run, base = limpet.Run(url), None
    for step in range(1, 5):
        metadata = VersionMetadata(step=step, metrics={"loss": 1 / step})
        location = run.location(Version(step))
        job = begin_save(
            location, with_frozen(step), metadata, shared_pool(), stage_now=False, base=base
        )
        base = finish_save(job)


class Scaled(torch.Tensor):
    """A tensor of another class: codes, and a scale for each row."""

    __module__ = "tests.golden.make"  # also if this file is the main program

    codes: torch.Tensor
    scale: torch.Tensor
    bits: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> None:
        self.codes, self.scale, self.bits = codes, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"bits": self.bits, "dtype": self.scale.dtype}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> Scaled:
        return cls(inner["codes"], inner["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def scaled(step: int) -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.int8).view(2, 3) + step, torch.tensor([[0.5], [2.0]]))


def make_spread(url: str) -> None:
    """Save versions 1 and 2 of a run whose shards are spread."""
    live = {"progress": limpet.Progress(), "array": np.arange(5.0)}
    with limpet.Checkpointer(spread_over(open_store(url), 16), live, save=EverySteps(1)) as ckpt:
        for _ in range(2):
            live["array"] += 1
            ckpt.step()
            ckpt.wait()


if __name__ == "__main__":
    for make in (make_branches, make_chain, make_spread):
        make(f"{sys.argv[1]}/{make.__name__.removeprefix('make_')}")
