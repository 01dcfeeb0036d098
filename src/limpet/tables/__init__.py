"""Embedding tables: vectors by id, with one row per id that has had a gradient.

Terms: a *table* has vectors of one length; a *row* is the vector of one id, with its *slots* (the
state of the optimizer); a *bucket* is one of 4,096 sets of ids, by a hash of the id; a *shard* is
the rows of a table on one server; a *push* is an update of rows by their gradients; a *cut* is the
rows as they were at one moment.
May import: the root modules, ``convert``, ``format``, ``layout``, ``loading``, ``ranks``, ``run``,
``snapshot``, ``state``, ``storage``, ``tasks``, ``evaluation``, ``training``, and ``tables``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limpet.lazy_names import lazy_names

if TYPE_CHECKING:
    from limpet.tables.ids import hash_ids as hash_ids
    from limpet.tables.modules import Embedding as Embedding, EmbeddingBag as EmbeddingBag
    from limpet.tables.servers import Servers as Servers
    from limpet.tables.table import (
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        Constant as Constant,
        Evict as Evict,
        Normal as Normal,
        RowwiseAdagrad as RowwiseAdagrad,
        Table as Table,
        TruncatedNormal as TruncatedNormal,
        Uniform as Uniform,
    )
    from limpet.tables.view import View as View, open as open
    from limpet.tables.worker import Worker as Worker

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "tables.ids": "hash_ids",
        "tables.modules": "Embedding EmbeddingBag",
        "tables.servers": "Servers",
        "tables.table": "Table Evict SGD Adagrad RowwiseAdagrad Adam Constant Uniform "
        "Normal TruncatedNormal",
        "tables.view": "View open",
        "tables.worker": "Worker",
    },
)
