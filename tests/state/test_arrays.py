"""A library of arrays that the package does not know is one class and one line in a table.

Its arrays are like JAX's: in parts on several devices, and never written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import PlanError
from limpet.state import arrays
from limpet.state.arrays import ArrayLibrary, LocalBoxes
from limpet.types import Box
from tests.fakegroup import FakeGroup
from tests.states import unused_url


class Shard:
    """The part of an array on one device. Its bytes can only be copied."""

    def __init__(self, device: str, data: np.ndarray[Any, Any]) -> None:
        self.device, self.shape, self.nbytes = device, data.shape, data.nbytes
        self._data = data

    def __getitem__(self, index: Any) -> Shard:
        return Shard(self.device, self._data[index])

    def read(self) -> bytes:
        return self._data.tobytes()


class Array:
    """An immutable array whose rows are divided among devices."""

    def __init__(self, shape: tuple[int, ...], dtype: str, shards: Sequence[tuple[int, Shard]]):
        self.shape, self.dtype, self.shards = shape, np.dtype(dtype), tuple(shards)

    @classmethod
    def of(cls, data: Any, devices: Sequence[str] = ("d0", "d1"), first: int = 0, rows: int = 0):
        """Return the rows of ``data`` from ``first`` on, of ``rows`` in all, on the devices."""
        data = np.array(data)
        at = [len(data) * i // len(devices) for i in range(len(devices) + 1)]
        shards = [
            (first + a, Shard(device, data[a:b]))
            for device, a, b in zip(devices, at, at[1:], strict=False)
        ]
        return cls((rows or len(data), *data.shape[1:]), data.dtype.name, shards)

    def read(self) -> np.ndarray[Any, Any]:
        rows = [np.frombuffer(s.read(), self.dtype).reshape(s.shape) for _, s in self.shards]
        return np.concatenate(rows)


class Library(ArrayLibrary):
    synchronized = 0

    def describe(self, value: Array) -> tuple[str, str]:
        return "array", value.dtype.name

    def local_boxes(self, value: Array, key: str) -> LocalBoxes:
        zeros = (0,) * (len(value.shape) - 1)
        parts = [(Box((at, *zeros), shard.shape), shard) for at, shard in value.shards]
        return LocalBoxes(value.shape, parts, value.dtype.name, tag="array")

    def target(self, value: Array, part: Shard, key: str) -> Any:
        return np.empty(part.shape, value.dtype)

    def loaded(self, value: Array, boxes: Sequence[tuple[Box, Any]]) -> Array:
        new = [
            (box.offsets[0], Shard(shard.device, into))
            for (_, shard), (box, into) in zip(value.shards, boxes, strict=True)
        ]
        return Array(value.shape, value.dtype.name, new)

    def can_cast(self, stored: str, value: Array) -> bool:
        return np.can_cast(stored, value.dtype, "same_kind")

    def copy_range(self, part: Shard, start: int, stop: int, out: memoryview) -> None:
        out[:] = part.read()[start:stop]

    def synchronize(self, parts: Sequence[Any]) -> None:
        self.synchronized += 1


LIBRARY = Library()


def library_of(cls: type) -> ArrayLibrary | None:
    return LIBRARY if issubclass(cls, Array | Shard) else None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    package = __name__.partition(".")[0]
    arrays.LIBRARIES[package] = __name__
    arrays.library_of.cache_clear()
    yield
    del arrays.LIBRARIES[package]
    arrays.library_of.cache_clear()


DATA = np.arange(42, dtype="f4").reshape(7, 6)


def test_an_array_on_two_devices_is_saved_verified_and_restored_as_a_new_array() -> None:
    before, url = LIBRARY.synchronized, unused_url()
    live = Array.of(DATA)
    snapshot = limpet.save(url, {"params": {"w": live}, "t": torch.ones(3), "n": 4})
    assert LIBRARY.synchronized > before
    assert snapshot.verify().ok
    other = Array.of(np.zeros_like(DATA), devices=("d1", "d2", "d3"))
    into = {"params": {"w": other}, "t": torch.zeros(3), "n": 0}
    limpet.load(url, into=into)
    loaded = into["params"]["w"]
    assert loaded is not other
    assert np.array_equal(loaded.read(), DATA)
    assert [s.device for _, s in loaded.shards] == ["d1", "d2", "d3"]
    assert not other.read().any(), "the live array is never written to"
    assert into["t"].sum() == 3


def test_it_is_exchanged_with_numpy_in_both_directions() -> None:
    urls = unused_url(), unused_url()
    limpet.save(urls[0], {"w": Array.of(DATA)})
    assert np.array_equal(limpet.load(urls[0])["w"], DATA)
    into: dict[str, Any] = {"w": np.zeros_like(DATA)}
    limpet.load(urls[0], into=into)
    assert np.array_equal(into["w"], DATA)
    limpet.save(urls[1], {"w": DATA})
    into = {"w": Array.of(np.zeros_like(DATA))}
    limpet.load(urls[1], into=into)
    assert np.array_equal(into["w"].read(), DATA)


def test_ranks_save_the_parts_of_one_array() -> None:
    url = unused_url()
    group = FakeGroup(2)
    rows = [(0, 4), (4, 7)]

    def save(rank: int) -> None:
        first, stop = rows[rank]
        limpet.save(url, {"w": Array.of(DATA[first:stop], first=first, rows=7)})

    group.run(save)
    assert np.array_equal(limpet.load(url)["w"], DATA)


def test_another_shape_or_dtype_is_refused_and_a_cast_is_made_if_it_was_requested() -> None:
    url = unused_url()
    limpet.save(url, {"w": Array.of(DATA)})
    live = Array.of(np.zeros((3, 6), "f4"))
    into: dict[str, Any] = {"w": live}
    with pytest.raises(PlanError, match=r"w \[7, 6\], live \[3, 6\]"):
        limpet.load(url, into=into)
    into = {"w": Array.of(DATA.astype("f8"))}
    with pytest.raises(PlanError, match="w float32, live float64"):
        limpet.load(url, into=into)
    limpet.load(url, into=into, cast=True)
    assert into["w"].dtype == "f8"
    assert np.array_equal(into["w"].read(), DATA)


def test_a_training_saves_and_resumes_it(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    state: dict[str, Any] = {"w": Array.of(DATA), "progress": limpet.Progress()}
    with limpet.Checkpointer(url, state, save=limpet.EverySteps(1), quiet=True) as ckpt:
        ckpt.resume()
        state["w"] = Array.of(DATA + 1)
        ckpt.step()
    state = {"w": Array.of(np.zeros_like(DATA)), "progress": limpet.Progress()}
    with limpet.Checkpointer(url, state, save=limpet.EverySteps(1), quiet=True) as ckpt:
        ckpt.resume(check=True)
    assert np.array_equal(state["w"].read(), DATA + 1)


def test_a_read_only_array_is_replaced_also_in_a_boxed() -> None:
    def read_only() -> np.ndarray[Any, Any]:
        array = np.zeros(DATA.shape, "f8")
        array.flags.writeable = False
        return array

    url = unused_url()
    limpet.save(url, {"a": DATA, "b": limpet.Boxed(DATA, (0, 0), DATA.shape)})
    a, b = read_only(), limpet.Boxed(read_only(), (0, 0), DATA.shape)
    into: dict[str, Any] = {"a": a, "b": b}
    limpet.load(url, into=into, cast=True)
    assert not a.any()
    assert not b.tensor.any()
    for loaded in (into["a"], into["b"].tensor):
        assert loaded.dtype == "f8"
        assert np.array_equal(loaded, DATA)


def test_a_boxed_without_elements_is_loaded() -> None:
    url, state = unused_url(), {"b": limpet.Boxed(np.zeros((0, 3)), (0, 0), (0, 6))}
    limpet.save(url, state)
    limpet.load(url, into=state)
