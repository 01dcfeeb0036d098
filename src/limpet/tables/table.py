"""A table, as a user declares it: its rows, how they begin, and how they are updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.arguments import check_count, check_whole, require
from limpet.errors import LimpetError, ManifestInvalid
from limpet.format.names import escape_level
from limpet.tables.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform
from limpet.tables.optimizers import FTRL, SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES: dict[Any, str] = {dtype: name for name, dtype in _DTYPES.items()}
_INITIALIZERS = (Constant, Uniform, Normal, TruncatedNormal)
_OPTIMIZERS = (SGD, Adagrad, RowwiseAdagrad, Adam, FTRL)


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
        limits = {name: getattr(self, name) for name in ("max_rows", "unused_steps", "min_count")}
        given = {name: value for name, value in limits.items() if value is not None}
        require("Evict", bool(given), "given max_rows, unused_steps, or min_count", "nothing")
        for name, value in {**given, "every": self.every}.items():
            object.__setattr__(self, name, check_count(f"{name} of Evict", value))


@dataclass(frozen=True)
class Table:
    """An embedding table: vectors of ``dim`` elements, by ids that are any int64.

    - ``name``: the name, such as ``"words"``; one level of a key of the state.
    - ``optimizer``: SGD, Adagrad, RowwiseAdagrad, Adam, or FTRL. Its ``lr`` is the first one.
    - ``initializer``: Constant, Uniform, Normal, or TruncatedNormal: the vector of an id before
      its first gradient, a function of ``seed``, ``name``, the id, and the column.
    - ``dtype``: of the vectors, torch.float32 or torch.bfloat16. Slots are float32.
    - ``admit_after``: an id gets a row with its ``admit_after``-th gradient. Earlier ones are
      counted and dropped.
    - ``evict``: which rows are dropped; None: none.
    - ``nan``: what to do with a gradient that is not finite: "error" raises ``LimpetError`` before
      anything changes; "skip" drops and counts the gradients of such rows.

    Raises ``LimpetError`` if an argument is wrong.
    """

    name: str
    dim: int
    _: KW_ONLY
    optimizer: Optimizer
    initializer: Initializer = field(default_factory=Uniform)
    dtype: torch.dtype | str = torch.float32
    seed: int = 0
    admit_after: int = 1
    evict: Evict | None = None
    nan: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        name = self.name
        is_level = isinstance(name, str) and name.isprintable() and escape_level(name) == name
        require("The name of a table", is_level, 'a text without "/" and "~", not empty', name)
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        require(f"dtype of {name}", dtype in _DTYPES.values(), "float32 or bfloat16", self.dtype)
        is_known = isinstance(self.optimizer, _OPTIMIZERS)
        require(f"optimizer of {name}", is_known, f"one of {_names(_OPTIMIZERS)}", self.optimizer)
        is_known = isinstance(self.initializer, _INITIALIZERS)
        kinds = f"one of {_names(_INITIALIZERS)}"
        require(f"initializer of {name}", is_known, kinds, self.initializer)
        is_known = self.evict is None or isinstance(self.evict, Evict)
        require(f"evict of {name}", is_known, "Evict(...) or None", self.evict)
        require(f"nan of {name}", self.nan in ("error", "skip"), '"error" or "skip"', self.nan)
        seed = check_whole(f"seed of {name}", self.seed, "a whole number below 2**63", 0, 2**63 - 1)
        for field_name, value in (
            ("dim", check_count(f"dim of {name}", self.dim)),
            ("dtype", dtype),
            ("seed", seed),
            ("admit_after", check_count(f"admit_after of {name}", self.admit_after)),
        ):
            object.__setattr__(self, field_name, value)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the vectors."""
        return _DTYPES[_NAMES[self.dtype]]

    def initial(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Return the initial vectors of ids, ``[len(ids), dim]`` of the table's dtype."""
        key = xxh3_64_intdigest(self.name.encode(), seed=self.seed)
        vectors = torch.from_numpy(self.initializer.initial(ids, key, self.dim))
        return vectors.to(self.torch_dtype)

    def to_plain(self) -> dict[str, Any]:
        """Return what a version says of the table, as plain values."""
        return {
            "name": self.name,
            "dim": self.dim,
            "dtype": _NAMES[self.dtype],
            "seed": self.seed,
            "initializer": {"kind": type(self.initializer).__name__, **asdict(self.initializer)},
            "optimizer": {"kind": type(self.optimizer).__name__, **asdict(self.optimizer)},
            "admit_after": self.admit_after,
        }

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Table:
        """Return the table of a version (``to_plain``). Raises ``ManifestInvalid`` if that is no
        table that this release knows."""
        try:
            return cls(
                **{name: saved[name] for name in ("name", "dim", "dtype", "seed", "admit_after")},
                initializer=_from_plain(_INITIALIZERS, saved["initializer"]),
                optimizer=_from_plain(_OPTIMIZERS, saved["optimizer"]),
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
        theirs, ours = other.to_plain(), self.to_plain()
        fields = {name: (theirs[name], ours[name]) for name in ("name", "dim", "dtype", "seed")}
        parts = ["initializer"]
        kinds = type(other.optimizer), type(self.optimizer)
        if kinds[0] is not kinds[1] or other.optimizer.slots(1) != self.optimizer.slots(1):
            parts.append("optimizer")
        for part in parts:
            names = theirs[part].keys() & ours[part].keys() - {"lr"}
            if theirs[part]["kind"] != ours[part]["kind"]:
                names = {"kind"}
            for name in sorted(names):
                fields[f"{part}/{name}"] = (theirs[part][name], ours[part][name])
        return {
            key: f"{saved}, live {live}" for key, (saved, live) in fields.items() if saved != live
        }


def _names(kinds: Iterable[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _from_plain(kinds: Iterable[type[Any]], saved: Mapping[str, Any]) -> Any:
    fields = dict(saved)
    return {kind.__name__: kind for kind in kinds}[fields.pop("kind")](**fields)
