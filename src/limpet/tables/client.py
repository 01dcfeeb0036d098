"""The tables as one process of a training sees them: it pulls rows, and collects gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from limpet.errors import LimpetError
from limpet.tables.ids import Ids, bucket_of, to_ids, unique
from limpet.tables.messages import RowGradients, Sender, merge_gradients
from limpet.tables.table import Table

Call = Callable[[str, Mapping[int, tuple[Any, ...]]], dict[int, Any]]
"""Calls a method of some servers, each with arguments of its own, and returns what they return.
It raises what they raise, and ``ServersLost``."""


class ServersLost(LimpetError):
    """Servers did not answer, because their processes have ended; the field ``servers`` has their
    numbers."""


def call_all(engine: Any, method: str, *arguments: Any) -> dict[int, Any]:
    """Call a method of all servers of an ``Engine`` with the same arguments."""
    found: dict[int, Any] = engine.call(method, dict.fromkeys(range(engine.servers), arguments))
    return found


def _split(first_buckets: Sequence[int], ids: Ids) -> Iterator[tuple[int, Any]]:
    """Yield the servers that have some of the ids, each with an index that selects these."""
    if len(first_buckets) == 1:
        yield 0, slice(None)
        return
    server = np.searchsorted(first_buckets, bucket_of(ids), "right") - 1
    for number in range(len(first_buckets)):
        found = np.flatnonzero(server == number)
        if len(found):
            yield number, found


class TableClient:
    """Pulls rows of the tables, and collects their gradients until they are taken.

    ``sender``: what each message of a worker begins with. Gradients come from ``backward``, once
    for each look-up, also if a module is used several times. ``connect`` it first.
    """

    def __init__(self, *, has_gradients: bool = True) -> None:
        self._has_gradients = has_gradients
        self.sender: Sender | None = None
        self.cut = ""  # the cut of an evaluation, if the rows are those of then
        self._parts: dict[str, list[RowGradients]] = {}

    def connect(self, tables: Iterable[Table], first_buckets: Sequence[int], call: Call) -> None:
        """Use other servers from now on, each of which has the buckets from a first one on. A
        ``pull`` of another thread uses either the old or the new ones."""
        self._connected = {table.name: table for table in tables}, first_buckets, call

    @property
    def tables(self) -> Mapping[str, Table]:
        return self._connected[0]

    @property
    def first_buckets(self) -> Sequence[int]:
        return self._connected[1]

    def __deepcopy__(self, memo: object) -> TableClient:
        return self  # a copy of a model looks up the same rows

    def __reduce__(self) -> NoReturn:
        todo = "save them with limpet.save(), and create Servers and modules in each process"
        raise LimpetError(f"Tables cannot be pickled or copied: {todo}")

    def table(self, name: str) -> Table:
        """Return a table. Raises ``LimpetError`` if there is none of this name."""
        if name not in self.tables:
            known = ", ".join(map(repr, self.tables))
            raise LimpetError(f"There is no table {name!r}; the tables are {known}")
        return self.tables[name]

    def pull(self, name: str, ids: Ids) -> torch.Tensor:
        """Return the rows of ids, one for each, also if some are equal."""
        tables, first_buckets, call = self._connected
        table = tables.get(name) or self.table(name)  # which raises
        parts = dict(_split(first_buckets, ids))
        arguments = {n: (self.sender, name, ids[part], self.cut) for n, part in parts.items()}
        found: dict[int, torch.Tensor] = call("pull", arguments)
        if len(first_buckets) == 1:
            return found[0]
        rows = torch.empty(len(ids), table.dim, dtype=table.dtype, device="cpu")
        for number, part in parts.items():
            rows.index_copy_(0, torch.from_numpy(part), found[number])
        return rows

    def look_up(self, name: str, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the distinct ids, and for each id the number of its row, on the device
        of the ids. If gradients are computed, those of the rows are collected."""
        self.table(name)
        distinct, inverse = unique(to_ids(ids).reshape(-1))
        device = ids.device if isinstance(ids, torch.Tensor) else None
        rows = self.pull(name, distinct).to(device)
        if self._has_gradients and torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda leaf: self._collect(name, distinct, leaf)
            )
        return rows, torch.from_numpy(inverse).to(device).reshape(ids.shape)

    def _collect(self, name: str, ids: Ids, rows: torch.Tensor) -> None:
        if rows.grad is not None:
            gradients = rows.grad.to("cpu", torch.float32)
            self._parts.setdefault(name, []).append((ids, gradients))
            rows.grad = None  # a second backward pass through the same graph adds its own

    def take(self) -> dict[str, RowGradients]:
        """Return the sum of the gradients of each id by table, and forget them."""
        parts, self._parts = self._parts, {}
        return {name: merge_gradients(found) for name, found in parts.items()}

    def split(self, rows: Mapping[str, RowGradients]) -> list[dict[str, RowGradients]]:
        """Return the part of each server."""
        parts: list[dict[str, RowGradients]] = [{} for _ in self.first_buckets]
        for name, (ids, gradients) in rows.items():
            for number, part in _split(self.first_buckets, ids):
                chosen = part if isinstance(part, slice) else torch.from_numpy(part)
                parts[number][name] = ids[part], gradients[chosen]
        return parts
