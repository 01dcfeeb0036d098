"""Embedding tables: vectors by id, with one row per id that has had a gradient.

Terms: a *table* has vectors of one length; a *row* is the vector of one id, with its *slots* (the
state of the optimizer); a *bucket* is one of 4,096 sets of ids, by a hash of the id; a *shard* is
the rows of a table on one server; a *push* is an update of rows by their gradients; a *cut* is the
rows as they were at one moment.
May import: the root modules, ``format``, ``layout``, ``loading``, ``ranks``, ``run``, ``snapshot``,
``state``, ``storage``, ``tasks``, ``evaluation``, ``training``, and ``tables``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limpet.lazy_names import lazy_names

if TYPE_CHECKING:
    from limpet.tables.hashing import hash_ids as hash_ids
    from limpet.tables.initializers import (
        Constant as Constant,
        Normal as Normal,
        TruncatedNormal as TruncatedNormal,
        Uniform as Uniform,
    )
    from limpet.tables.modules import Embedding as Embedding, EmbeddingBag as EmbeddingBag
    from limpet.tables.optimizers import (
        FTRL as FTRL,
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        RowwiseAdagrad as RowwiseAdagrad,
    )
    from limpet.tables.servers import Servers as Servers
    from limpet.tables.table import Evict as Evict, Table as Table
    from limpet.tables.view import View as View, open as open
    from limpet.tables.worker import Worker as Worker

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "tables.hashing": "hash_ids",
        "tables.initializers": "Constant Normal TruncatedNormal Uniform",
        "tables.modules": "Embedding EmbeddingBag",
        "tables.optimizers": "FTRL SGD Adagrad Adam RowwiseAdagrad",
        "tables.servers": "Servers",
        "tables.table": "Evict Table",
        "tables.view": "View open",
        "tables.worker": "Worker",
    },
)
