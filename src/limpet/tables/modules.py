"""Modules that look rows up in tables. They have no parameters: the tables have the rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn import functional

from limpet.arguments import require
from limpet.tables.client import TableClient


class _LookUp(torch.nn.Module):
    def __init__(self, tables: Any, name: str, *, padding_idx: int | None = None) -> None:
        super().__init__()
        client = getattr(tables, "client", tables)
        expected = "the Servers, the tables of a Worker, or a View"
        require("tables", isinstance(client, TableClient), expected, tables)
        self._client = client
        self.name, self.padding_idx = name, padding_idx
        self.embedding_dim = client.table(name).dim

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.embedding_dim}"

    def _look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the rows of distinct ids, the number of the row of each id, and the number of a
        row of zeros for the padding, which is no id of the table."""
        if self.padding_idx is None and ids.numel():
            return *self._client.look_up(self.name, ids), None
        is_id = ids != (self.padding_idx or 0)  # without a padding, there are no ids
        rows, numbers = self._client.look_up(self.name, ids[is_id])
        all_numbers = torch.full_like(ids, len(rows), dtype=torch.int64)
        all_numbers[is_id] = numbers
        return torch.cat([rows, rows.new_zeros(1, self.embedding_dim)]), all_numbers, len(rows)


class Embedding(_LookUp):
    """Like ``torch.nn.Embedding``: ids of any shape give their rows, ``[*, dim]``.

    ``tables``: the ``Servers``, or ``worker.tables``. ``name``: the table. ``padding_idx``: an id
    that gives zeros, and gets no row. Raises ``LimpetError`` for an unknown table, and for ids that
    are no integers.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, numbers, _ = self._look_up(ids)
        return functional.embedding(numbers, rows.float()).to(rows.dtype)


class EmbeddingBag(_LookUp):
    """Like ``torch.nn.EmbeddingBag``: the sum, mean, or maximum of the rows of each bag of ids.

    ``tables``, ``name``, and ``padding_idx``: as for ``Embedding``. The arguments of a call are
    those of ``torch.nn.EmbeddingBag``: ids ``[bags, n]``, or ``[n]`` with the ``offsets`` of the
    bags, and ``per_sample_weights`` for ``mode="sum"``. The result is ``[bags, dim]``.
    """

    def __init__(
        self,
        tables: Any,
        name: str,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(tables, name, padding_idx=padding_idx)
        require("mode=", mode in ("sum", "mean", "max"), '"sum", "mean", or "max"', mode)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, numbers, padding = self._look_up(ids)
        dtype, rows = rows.dtype, rows.float()  # a sum of ones in bfloat16 ends at 256
        if numbers.shape[1:] == (1,) and offsets is None and per_sample_weights is None:
            return functional.embedding(numbers[:, 0], rows).to(dtype)  # a faster backward pass
        bags = functional.embedding_bag(
            numbers,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.float(),
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        return bags.to(dtype)
