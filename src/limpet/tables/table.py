"""A table, as a user declares it: initial vectors, optimizers of rows, and which rows it evicts.

Everything has the same result on every machine, whatever rows are computed with it: random bits
come from integer operations, and each float operation is exact or rounded once (no fused
operations, whose vectors and remainders may differ).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.arguments import check_count, real, require
from limpet.errors import LimpetError, ManifestInvalid
from limpet.format.names import escape_level
from limpet.tables.ids import Ids, mix

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PLAIN = ("name", "dim", "dtype", "seed", "admit_after")
MOST = 1e30  # far from the limits of float32
_LEAST = {
    **dict.fromkeys(("value", "mean"), -MOST),
    **dict.fromkeys(("lr", "momentum", "initial_accumulator"), 0.0),
    **dict.fromkeys(("eps", "scale", "std"), 1e-30),
}
_EXPECTED = {-MOST: "a finite number", 0.0: "a number, 0 or more"}
_WORDS = 1 << 16  # random words of one block: with its temporaries, it fits in the L2 cache


class _Parameters:
    """A frozen dataclass, whose floats are within ``_LEAST`` and ``MOST``."""

    def __post_init__(self) -> None:
        for name in [name for name in vars(self) if name in _LEAST]:
            value, least = getattr(self, name), _LEAST[name]
            expected = _EXPECTED.get(least, "a number that is more than 0")
            is_valid = (number := real(value)) is not None and least <= number <= MOST
            require(f"{name} of {type(self).__name__}", is_valid, expected, value)
            object.__setattr__(self, name, float(value))


# -- initial vectors: a function of (seed, table, id, column), so that an unseen id needs no row ---


@dataclass(frozen=True)
class Constant(_Parameters):
    """Every element of an initial vector is ``value``."""

    value: float = 0.0

    def initial(self, ids: Ids, key: int, dim: int) -> NDArray[np.float32]:
        return np.full((len(ids), dim), self.value, np.float32)


@dataclass(frozen=True)
class Uniform(_Parameters):
    """Elements are uniform between ``-scale`` and ``scale``: one of 2**24 values, symmetric."""

    scale: float = 0.05

    def initial(self, ids: Ids, key: int, dim: int) -> NDArray[np.float32]:
        out = np.empty((len(ids), dim), np.float32)
        unit = np.float32(self.scale) * np.float32(2**-24)
        for part, words in _random_words(ids, key, dim):
            odd = words.view(np.int32)
            odd >>= 7
            odd |= 1  # an odd number of 25 bits with its sign: exact as a float32
            np.multiply(odd, unit, out=out[part], dtype=np.float32, casting="unsafe")
        return out


@dataclass(frozen=True)
class Normal(_Parameters):
    """Elements have a normal distribution: one of its 65,536 quantiles."""

    mean: float = 0.0
    std: float = 0.05
    _cut: ClassVar[float | None] = None  # in standard deviations

    def initial(self, ids: Ids, key: int, dim: int) -> NDArray[np.float32]:
        scaled = _quantiles(self._cut) * np.float32(self.std) + np.float32(self.mean)
        out = np.empty((len(ids), dim), np.float32)
        for part, words in _random_words(ids, key, dim):
            words >>= np.uint32(16)
            np.take(scaled, words, out=out[part], mode="clip")
        return out


@dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Elements have a normal distribution that is cut at two standard deviations."""

    _cut: ClassVar[float | None] = 2.0


Initializer = Constant | Uniform | Normal | TruncatedNormal
"""``initial`` returns the initial vectors of ids, float32 ``[len(ids), dim]``; ``key`` is a hash of
the seed and the name of the table."""


@cache
def _quantiles(cut: float | None) -> NDArray[np.float32]:
    """The quantiles of the standard normal distribution, at the middles of 65,536 steps."""
    normal, half = NormalDist(), 1 << 15
    least = 0.0 if cut is None else normal.cdf(-cut)
    steps = [least + (0.5 - least) * (i + 0.5) / half for i in range(half)]
    lower = np.array([normal.inv_cdf(p) for p in steps])
    return np.concatenate([lower, -lower[::-1]]).astype(np.float32)


def _random_words(ids: Ids, key: int, dim: int) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
    """Yield slices of the ids, with random words ``[rows, dim]`` that the caller may overwrite.

    A word is a function of (key, id, column). Both halves of an id's hash enter, on two sides of a
    multiplication, so that two ids do not share several columns.
    """
    columns = np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
    hashes = mix(mix(ids) ^ np.uint64(key))[:, None]
    low, high = hashes.astype(np.uint32), (hashes >> np.uint64(32)).astype(np.uint32)
    rows = max(1, _WORDS // dim)
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        x = low[part] + columns
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= high[part]
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        yield part, x


# -- optimizers: as torch.optim on one parameter per row -------------------------------------------

Slots = Mapping[str, torch.Tensor]
"""Slots of the rows of an update, by name: each float32 ``[rows, width]``."""


@dataclass(frozen=True)
class SGD(_Parameters):
    """Stochastic gradient descent, as torch.optim.SGD (momentum without dampening)."""

    lr: float
    momentum: float = 0.0

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"momentum": (dim, 0.0)} if self.momentum else {}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        if self.momentum:
            grads = slots["momentum"].mul_(self.momentum).add_(grads)
        values.sub_(grads * lr)


@dataclass(frozen=True)
class Adagrad(_Parameters):
    """Adagrad (Duchi et al., 2011), as torch.optim.Adagrad."""

    lr: float
    initial_accumulator: float = 0.0
    eps: float = 1e-10

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"sum": (dim, self.initial_accumulator)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        total = slots["sum"].add_(grads * grads)
        values.sub_((grads * lr).div_(total.sqrt().add_(self.eps)))


@dataclass(frozen=True)
class RowwiseAdagrad(_Parameters):
    """Adagrad with one accumulator per row: the sum of the mean squares of its gradients, as
    EXACT_ROWWISE_ADAGRAD of FBGEMM."""

    lr: float
    eps: float = 1e-10

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"sum": (1, 0.0)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        total = slots["sum"].add_(_row_sums(grads * grads).div_(values.shape[1]))
        values.sub_((grads * lr).div_(total.sqrt().add_(self.eps)))


@dataclass(frozen=True)
class Adam(_Parameters):
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam. The bias of a row is corrected by the number
    of its own updates; a row without a gradient does not change."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        is_pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        numbers = [real(beta) for beta in self.betas] if is_pair else []
        is_valid = is_pair and all(beta is not None and 0 <= beta < 1 for beta in numbers)
        require("betas of Adam", is_valid, "two numbers, 0 or more and less than 1", self.betas)
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"step": (1, 0.0), "exp_avg": (dim, 0.0), "exp_avg_sq": (dim, 0.0)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        beta1, beta2 = self.betas
        mean, square = slots["exp_avg"], slots["exp_avg_sq"]
        mean.mul_(beta1).add_(grads * (1 - beta1))
        square.mul_(beta2).add_((grads * (1 - beta2)).mul_(grads))
        # NumPy's power has the same result wherever an element is; torch's vectors have not
        steps = slots["step"].add_(1).numpy().astype(np.float64)
        rates = torch.from_numpy((lr / (1 - np.power(beta1, steps))).astype(np.float32))
        roots = torch.from_numpy(np.sqrt(1 - np.power(beta2, steps)).astype(np.float32))
        values.sub_((mean * rates).div_(square.sqrt().div_(roots).add_(self.eps)))


Optimizer = SGD | Adagrad | RowwiseAdagrad | Adam
"""``slots`` returns the width and the initial value of each slot. ``update`` changes values
(float32 ``[rows, dim]``) and their slots in place."""


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, ``[rows, 1]``, in an order that depends on the width only."""
    while (width := x.shape[1]) > 1:
        half = width // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat([folded, x[:, 2 * half :]], dim=1) if width % 2 else folded
    return x


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evict:
    """Which rows a table evicts. An evicted id that comes back is new.

    - ``max_rows``: never more rows than this after an update. If there would be more, the least
      recently updated rows go until 15/16 of them are left; of rows of one step, those with the
      smaller count go first, then those with the smaller id. Each server has the part of
      ``max_rows`` that its buckets are of all buckets.
    - ``unused_steps``: rows go that had no gradient in more than this number of steps.
    - ``min_count``: rows go that had fewer gradients.
    - ``every``: the last two are looked at after each step that is a multiple of it.

    Ids that are not yet admitted (``admit_after``) obey ``max_rows`` and ``unused_steps``, too.
    """

    max_rows: int | None = None
    unused_steps: int | None = None
    min_count: int | None = None
    every: int = 1000

    def __post_init__(self) -> None:
        limits = ("max_rows", "unused_steps", "min_count")
        given = [name for name in limits if getattr(self, name) is not None]
        require("Evict", bool(given), "given max_rows, unused_steps, or min_count", "nothing")
        for name in (*given, "every"):
            object.__setattr__(self, name, check_count(f"{name} of Evict", getattr(self, name)))


@dataclass(frozen=True)
class Table:
    """An embedding table: vectors of ``dim`` elements, by ids that are any int64.

    - ``name``: the name, such as ``"words"``; one level of a key of the state.
    - ``optimizer``: SGD, Adagrad, RowwiseAdagrad, or Adam. Its ``lr`` is the first one.
    - ``initializer``: Constant, Uniform, Normal, or TruncatedNormal: the vector of an id before
      its first gradient, a function of ``seed``, ``name``, the id, and the column.
    - ``dtype``: of the vectors, torch.float32 or torch.bfloat16. Slots are float32.
    - ``admit_after``: an id gets a row with its ``admit_after``-th gradient. Earlier ones are
      counted and dropped.
    - ``evict``: which rows are dropped; None: none.
    - ``nan``: what to do with a gradient that is not finite: "error" raises ``LimpetError`` before
      anything changes; "skip" drops and counts the gradients of such rows.
    - ``old_rows``: while a version is written or evaluated, a row is copied before it changes. When
      the copies reach this part of the table, and 4 MiB, updates wait.

    Raises ``LimpetError`` if an argument is wrong.
    """

    name: str
    dim: int
    _: KW_ONLY
    optimizer: Optimizer
    initializer: Initializer = field(default_factory=Uniform)
    dtype: Any = torch.float32  # a torch dtype, whatever was given
    seed: int = 0
    admit_after: int = 1
    evict: Evict | None = None
    nan: Literal["error", "skip"] = "error"
    old_rows: float = 0.25

    def __post_init__(self) -> None:
        name = self.name
        is_level = isinstance(name, str) and name.isprintable() and escape_level(name) == name
        require("The name of a table", is_level, 'a text without "/" and "~", not empty', name)
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        is_part = real(self.old_rows) is not None and 0 <= self.old_rows <= MOST
        for key, is_valid, expected in (
            ("dtype", dtype in _DTYPES.values(), "float32 or bfloat16"),
            ("optimizer", isinstance(self.optimizer, Optimizer), "such as Adagrad(lr=0.05)"),
            ("initializer", isinstance(self.initializer, Initializer), "such as Uniform(0.05)"),
            ("evict", isinstance(self.evict, Evict | None), "Evict(...) or None"),
            ("nan", self.nan in ("error", "skip"), '"error" or "skip"'),
            ("old_rows", is_part, "a number, 0 or more"),
        ):
            require(f"{key} of {name}", is_valid, expected, getattr(self, key))
        object.__setattr__(self, "dtype", dtype)
        for key, least in (("dim", 1), ("seed", 0), ("admit_after", 1)):
            number = check_count(f"{key} of {name}", getattr(self, key), least)
            object.__setattr__(self, key, number)
        require(f"seed of {name}", self.seed < 2**63, "less than 2**63", self.seed)

    def initial(self, ids: Ids) -> torch.Tensor:
        """Return the initial vectors of ids, ``[len(ids), dim]`` of the table's dtype."""
        key = xxh3_64_intdigest(self.name.encode(), seed=self.seed)
        return torch.from_numpy(self.initializer.initial(ids, key, self.dim)).to(self.dtype)

    def to_plain(self) -> dict[str, Any]:
        """Return what a version says of the table, as plain values."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        for name in ("initializer", "optimizer"):
            part = getattr(self, name)
            plain[name] = {"kind": type(part).__name__, **asdict(part)}
        return plain | {"dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Table:
        """Return the table of a version (``to_plain``). Raises ``ManifestInvalid`` if that is no
        table that this release knows."""
        try:
            return cls(
                **{name: saved[name] for name in _PLAIN},
                initializer=_from_plain(Initializer, saved["initializer"]),
                optimizer=_from_plain(Optimizer, saved["optimizer"]),
            )
        except (KeyError, TypeError, LimpetError) as e:
            what = "A version has a table that this release of Limpet does not know"
            raise ManifestInvalid(what, found=str(e), todo="Use a newer release") from e

    def differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """Return how the table of a version differs where a restore does not allow it: relative
        keys, and texts such as "64, live 32". Empty if it can be restored.

        The learning rate, ``admit_after``, ``evict``, and ``nan`` may differ, and so may fields of
        the optimizer that its slots do not depend on.
        """
        other = Table.from_plain(saved)
        pairs: dict[str, Any] = {n: (getattr(other, n), getattr(self, n)) for n in _PLAIN[:4]}
        for part in ("initializer", "optimizer"):
            theirs, ours = getattr(other, part), getattr(self, part)
            pairs[f"{part}/kind"] = type(theirs).__name__, type(ours).__name__
            is_same = type(theirs) is type(ours)
            if is_same and (part == "initializer" or theirs.slots(1) != ours.slots(1)):
                pairs |= {f"{part}/{n}": (v, getattr(ours, n)) for n, v in vars(theirs).items()}
        pairs.pop("optimizer/lr", None)
        differing = {key: f"{a}, live {b}" for key, (a, b) in pairs.items() if a != b}
        return {key: text.replace("torch.", "") for key, text in differing.items()}


def _from_plain(kinds: Any, saved: Mapping[str, Any]) -> Any:
    fields = dict(saved)
    return {kind.__name__: kind for kind in get_args(kinds)}[fields.pop("kind")](**fields)
