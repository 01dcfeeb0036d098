"""Helpers that the parts of the Store contract share."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limpet.buffers import Buffer
from limpet.errors import LimpetError
from limpet.storage.store import Stat, Store, Upload


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def put(store: Store, key: str, data: bytes) -> Stat:
    """Write and commit an object in one piece."""
    with store.put(key, len(data)) as upload:
        upload.write_at(0, memoryview(data))
        return upload.commit()


def begin(store: Store, key: str, length: int, head: int) -> Upload:
    """Begin an upload as a save does: only a store that uploads in parts is told of the header."""
    return store.put(key, length, head) if store.traits.part_size else store.put(key, length)


def read(store: Store, key: str, offset: int, length: int) -> bytes:
    into = bytearray(length)
    store.get_range(key, offset, length, memoryview(into))
    return bytes(into)


def keys(store: Store, prefix: str = "") -> list[str]:
    return [stat.key for stat in store.list(prefix)]


def partial_keys(store: Store) -> list[str]:
    return [stat.key for stat in store.partials("")]


class Contract:
    """Fixtures and assertions of ``StoreContract``."""

    put_sees_existing = True
    partials_are_listed = True

    def make_store(self, folder: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make_store(tmp_path)

    @staticmethod
    def reads(store: Store, key: str) -> list[Callable[[], Any]]:
        """Return a call of every method that reads ``key``."""
        return [
            lambda: store.get(key, 1 << 20),
            lambda: store.get_range(key, 0, 1, memoryview(bytearray(1))),
            lambda: store.get_range(key, 0, 0, memoryview(bytearray(1))),
            lambda: store.get_range(key, 0, 4096, Buffer(4096).view),
            lambda: store.stat(key),
        ]

    @staticmethod
    def assert_empty(store: Store) -> None:
        assert keys(store) == partial_keys(store) == []

    @staticmethod
    def assert_names(error: LimpetError, store: Store, key: str) -> None:
        assert (error.key, error.store) == (key, store.url)
        assert key in str(error)
        assert store.url in str(error)
