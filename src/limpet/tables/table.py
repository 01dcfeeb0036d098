"""A table, as a user declares it: its rows, how they begin, and how they are updated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.arguments import check_count, require
from limpet.errors import LimpetError, ManifestInvalid
from limpet.format.names import escape_level
from limpet.tables.initializers import Initializer, Uniform
from limpet.tables.optimizers import Optimizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    dtype: Any = torch.float32  # a torch dtype, whatever was given
    seed: int = 0
    admit_after: int = 1
    evict: Evict | None = None
    nan: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        name = self.name
        is_level = isinstance(name, str) and name.isprintable() and escape_level(name) == name
        require("The name of a table", is_level, 'a text without "/" and "~", not empty', name)
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        for key, is_valid, expected in (
            ("dtype", dtype in _DTYPES.values(), "float32 or bfloat16"),
            ("optimizer", isinstance(self.optimizer, Optimizer), "such as Adagrad(lr=0.05)"),
            ("initializer", isinstance(self.initializer, Initializer), "such as Uniform(0.05)"),
            ("evict", isinstance(self.evict, Evict | None), "Evict(...) or None"),
            ("nan", self.nan in ("error", "skip"), '"error" or "skip"'),
        ):
            require(f"{key} of {name}", is_valid, expected, getattr(self, key))
        object.__setattr__(self, "dtype", dtype)
        for key, least in (("dim", 1), ("seed", 0), ("admit_after", 1)):
            number = check_count(f"{key} of {name}", getattr(self, key), least)
            object.__setattr__(self, key, number)
        require(f"seed of {name}", self.seed < 2**63, "less than 2**63", self.seed)

    def initial(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Return the initial vectors of ids, ``[len(ids), dim]`` of the table's dtype."""
        key = xxh3_64_intdigest(self.name.encode(), seed=self.seed)
        vectors = torch.from_numpy(self.initializer.initial(ids, key, self.dim))
        return vectors.to(self.dtype)

    def to_plain(self) -> dict[str, Any]:
        """Return what a version says of the table, as plain values."""
        return {
            "name": self.name,
            "dim": self.dim,
            "dtype": str(self.dtype).removeprefix("torch."),
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
        names = ("name", "dim", "dtype", "seed")
        pairs: dict[str, Any] = {
            name: (getattr(other, name), getattr(self, name)) for name in names
        }
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
