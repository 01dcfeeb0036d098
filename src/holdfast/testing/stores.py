"""The Store protocol as tests. Whoever brings a store of their own runs it through these::

class TestMyStore(StoreContract):
    def make_store(self, folder):
        return MyStore(folder)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.errors import AlreadyExists, HoldfastError, NotFound, StoreError
from holdfast.storage.direct import Buffer
from holdfast.storage.store import Stat, Store

_BAD_KEYS = ("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\0b", "k" * 901)
_LIMIT = 1 << 20


def sample(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def put(store: Store, key: str, data: bytes) -> Stat:
    """The object in one piece."""
    with store.put(key, len(data)) as upload:
        upload.write_at(0, memoryview(data))
        return upload.commit()


def read(store: Store, key: str, offset: int, length: int) -> bytes:
    into = bytearray(length)
    store.get_range(key, offset, length, memoryview(into))
    return bytes(into)


def keys(store: Store, prefix: str = "") -> list[str]:
    return [stat.key for stat in store.list(prefix)]


def leftovers(store: Store) -> list[str]:
    return [stat.key for stat in store.partials("")]


class StoreContract:
    """Every MUST of ``holdfast.storage.store.Store``. A subclass gives ``make_store``: a new,
    empty store; ``folder`` is an empty folder that it may use.

    ``put_sees_existing``: whether ``put`` under a key that is taken is refused (a store that
    cannot tell need not look).
    """

    put_sees_existing = True

    def make_store(self, folder: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make_store(tmp_path)

    # put

    @pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 100_000, (3 << 20) + 5])
    def test_what_was_put_is_read_back(self, store: Store, size: int) -> None:
        data = sample(size)
        stat = put(store, "v/a", data)
        assert (stat.key, stat.length) == ("v/a", size)
        assert store.get("v/a", size) == data
        assert read(store, "v/a", 0, size) == data
        assert keys(store) == ["v/a"]
        assert leftovers(store) == []

    def test_commit_gives_what_stat_gives(self, store: Store) -> None:
        assert put(store, "v/a", b"abc") == store.stat("v/a")

    def test_an_empty_object_needs_no_write(self, store: Store) -> None:
        with store.put("empty", 0) as upload:
            upload.commit()
        assert store.get("empty", 0) == b""

    def test_pieces_come_in_any_order_from_many_threads(self, store: Store) -> None:
        data, piece = sample(2_000_003), 65_536
        starts = list(range(0, len(data), piece))
        random.Random(1).shuffle(starts)
        view = memoryview(data)
        with store.put("v/a", len(data)) as upload, ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda at: upload.write_at(at, view[at : at + piece]), starts))
            upload.commit()
        assert store.get("v/a", len(data)) == data

    def test_pieces_need_not_be_aligned(self, store: Store) -> None:
        data, cuts = sample(50_000), [0, 1, 4095, 4097, 12_288, 20_481, 49_999, 50_000]
        buffer = Buffer(65_536)
        with store.put("a", len(data)) as upload:
            for start, end in pairwise(cuts):
                buffer.view[: end - start] = data[start:end]
                upload.write_at(start, buffer.view[: end - start])
            upload.commit()
        assert store.get("a", len(data)) == data

    def test_a_buffer_may_be_used_again_when_write_at_has_returned(self, store: Store) -> None:
        buffer = Buffer(8192)
        with store.put("a", 16_384) as upload:
            for at, byte in ((8192, b"2"), (0, b"1")):
                buffer.view[:] = byte * 8192
                upload.write_at(at, buffer.view)
            buffer.view[:] = b"3" * 8192
            upload.commit()
        assert store.get("a", 16_384) == b"1" * 8192 + b"2" * 8192

    def test_memory_of_any_element_type_is_taken_as_bytes(self, store: Store) -> None:
        data = sample(96)
        with store.put("a", 96) as upload:
            upload.write_at(0, cast(Any, memoryview(data).cast("d", (3, 4))))
            upload.commit()
        assert store.get("a", 96) == data

    def test_a_missing_byte_is_an_error_at_commit(self, store: Store) -> None:
        with store.put("v/a", 10) as upload:
            upload.write_at(0, memoryview(b"01234"))
            upload.write_at(6, memoryview(b"6789"))
            with pytest.raises(StoreError, match="byte 5"):
                upload.commit()
        self._nothing_is_left(store)

    def test_a_missing_end_is_an_error_at_commit(self, store: Store) -> None:
        with store.put("v/a", 10) as upload:
            upload.write_at(0, memoryview(b"01234"))
            with pytest.raises(StoreError):
                upload.commit()
        self._nothing_is_left(store)

    def test_a_byte_written_twice_is_an_error(self, store: Store) -> None:
        with store.put("v/a", 4) as upload:
            upload.write_at(0, memoryview(b"0123"))
            with pytest.raises(StoreError):  # noqa: PT012
                upload.write_at(1, memoryview(b"1"))
                upload.commit()
        self._nothing_is_left(store)

    @pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 11), (10, 1), (9, 2)])
    def test_a_piece_outside_is_an_error(self, store: Store, offset: int, size: int) -> None:
        with store.put("v/a", 10) as upload, pytest.raises(StoreError):
            upload.write_at(offset, memoryview(bytes(size)))
        self._nothing_is_left(store)

    def test_a_negative_length_is_an_error(self, store: Store) -> None:
        with pytest.raises(StoreError):
            store.put("a", -1)
        self._nothing_is_left(store)

    def test_nothing_is_visible_before_commit(self, store: Store) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
            assert keys(store) == []
            for look in (lambda: store.stat("v/a"), lambda: store.get("v/a", 9)):
                with pytest.raises(NotFound):
                    look()
            upload.commit()
        assert keys(store) == ["v/a"]

    def test_abort_leaves_nothing_also_twice(self, store: Store) -> None:
        upload = store.put("v/a", 3)
        upload.write_at(0, memoryview(b"abc"))
        upload.abort()
        upload.abort()
        self._nothing_is_left(store)

    def test_leaving_the_context_without_commit_aborts(self, store: Store) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
        self._nothing_is_left(store)
        with pytest.raises(KeyError), store.put("v/a", 3):
            raise KeyError
        self._nothing_is_left(store)

    def test_abort_after_commit_changes_nothing(self, store: Store) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
            upload.commit()
            upload.abort()
        assert store.get("v/a", 3) == b"abc"

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_an_upload_that_is_over_takes_no_more(self, store: Store, end: str) -> None:
        with store.put("v/a", 0) as upload:
            getattr(upload, end)()
            for call in (upload.commit, lambda: upload.write_at(0, memoryview(b""))):
                with pytest.raises(StoreError):
                    call()

    def test_abort_while_threads_write(self, store: Store) -> None:
        upload, data = store.put("v/a", 64 * 4096), memoryview(bytes(4096))

        def write(at: int) -> None:
            try:
                upload.write_at(at, data)
            except StoreError:
                return  # the upload was over before this piece

        with ThreadPoolExecutor(4) as threads:
            writes = [threads.submit(write, at * 4096) for at in range(64)]
            upload.abort()
            for done in writes:
                done.result()
        self._nothing_is_left(store)

    def test_uploads_do_not_mix(self, store: Store) -> None:
        def one(number: int) -> bool:
            data = sample(20_000, number)
            put(store, f"v/{number}", data)
            return store.get(f"v/{number}", len(data)) == data

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(one, range(16)))
        assert len(keys(store)) == 16

    def test_put_does_not_replace(self, store: Store) -> None:
        if not self.put_sees_existing:
            pytest.skip("this store's put does not look for an existing object")
        put(store, "v/a", b"first")
        with pytest.raises(AlreadyExists):
            put(store, "v/a", b"first")
        assert store.get("v/a", 9) == b"first"
        assert leftovers(store) == []

    # put_if_absent

    @pytest.mark.parametrize("size", [0, 1, 5000, 300_000])
    def test_put_if_absent_writes_whole(self, store: Store, size: int) -> None:
        stat = store.put_if_absent("v/m", sample(size))
        assert stat.length == size
        assert store.stat("v/m") == stat
        assert store.get("v/m", size) == sample(size)
        assert leftovers(store) == []

    def test_put_if_absent_leaves_the_first_bytes(self, store: Store) -> None:
        store.put_if_absent("v/m", b"first")
        for other in (b"other", b"", b"first and more"):
            with pytest.raises(AlreadyExists) as caught:
                store.put_if_absent("v/m", other)
            self._names(caught.value, store, "v/m")
        assert store.get("v/m", 99) == b"first"
        assert leftovers(store) == []

    def test_put_if_absent_of_the_same_bytes_succeeds(self, store: Store) -> None:
        store.put_if_absent("v/m", b"same")
        assert store.put_if_absent("v/m", b"same").length == 4
        assert leftovers(store) == []

    def test_of_sixteen_racing_writers_one_wins(self, store: Store) -> None:
        def race(number: int) -> int | None:
            try:
                store.put_if_absent("v/m", b"%d" % number * 1000)
            except AlreadyExists:
                return None
            return number

        for _ in range(3):
            with ThreadPoolExecutor(16) as threads:
                winners = [n for n in threads.map(race, range(10, 26)) if n is not None]
            assert len(winners) == 1
            assert store.get("v/m", 2000) == b"%d" % winners[0] * 1000
            assert leftovers(store) == []
            store.delete("v/m")

    def test_sixteen_racing_writers_of_the_same_bytes_all_succeed(self, store: Store) -> None:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda _: store.put_if_absent("v/m", b"same"), range(16)))
        assert store.get("v/m", 9) == b"same"

    # reading

    def test_get_takes_no_more_than_its_limit(self, store: Store) -> None:
        put(store, "a", b"12345")
        assert store.get("a", 5) == b"12345"
        with pytest.raises(StoreError) as caught:
            store.get("a", 4)
        assert not isinstance(caught.value, NotFound)
        self._names(caught.value, store, "a")

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        put(store, "v/a", b"1")
        for key in ("w", "v/b", "v", "w/x/y"):
            for look in self._looks(store, key):
                with pytest.raises(NotFound) as caught:
                    look()
                self._names(caught.value, store, key)

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 8192, 12_000])
    @pytest.mark.parametrize("length", [0, 1, 4096, 5000, 8000])
    def test_ranges(self, store: Store, offset: int, length: int) -> None:
        data = sample(20_000)
        put(store, "a", data)
        for room in (length, length + 1, length + 8192):
            buffer = Buffer(32_768)
            store.get_range("a", offset, length, buffer.view[:room])
            assert buffer.view[:length] == data[offset : offset + length]

    def test_a_range_up_to_the_very_end(self, store: Store) -> None:
        data = sample(10_001)
        put(store, "a", data)
        for offset in (0, 4096, 8192, 10_000, 10_001):
            buffer = Buffer(16_384)
            store.get_range("a", offset, 10_001 - offset, buffer.view)
            assert buffer.view[: 10_001 - offset] == data[offset:]

    @pytest.mark.parametrize(
        ("offset", "length", "found"),
        [
            (0, 10_002, 10_001),
            (8192, 4096, 1809),
            (10_001, 1, 0),
            (99_999, 1, 0),
            (12_288, 8192, 0),
        ],
    )
    def test_a_range_past_the_end_is_an_error(
        self, store: Store, offset: int, length: int, found: int
    ) -> None:
        put(store, "v/a", sample(10_001))
        with pytest.raises(StoreError, match=str(length)) as caught:
            store.get_range("v/a", offset, length, Buffer(16_384).view)
        assert str(found) in str(caught.value)
        assert str(offset) in str(caught.value)
        self._names(caught.value, store, "v/a")

    @pytest.mark.parametrize(("offset", "length", "room"), [(-1, 1, 9), (0, -1, 9), (0, 10, 9)])
    def test_a_range_that_cannot_be_is_an_error(
        self, store: Store, offset: int, length: int, room: int
    ) -> None:
        put(store, "a", sample(100))
        with pytest.raises(StoreError):
            store.get_range("a", offset, length, memoryview(bytearray(room)))

    def test_ranges_are_read_by_many_threads(self, store: Store) -> None:
        data, piece = sample(1_000_001), 40_000
        put(store, "v/a", data)
        with ThreadPoolExecutor(8) as threads:
            parts = threads.map(
                lambda at: read(store, "v/a", at, min(piece, len(data) - at)),
                range(0, len(data), piece),
            )
            assert b"".join(parts) == data

    # list, partials, delete

    def test_keys_are_listed_in_order(self, store: Store) -> None:
        names = ["b", "a/z", "a.b", "a-b", "a/b/c", "a0", "A", "ä", "a/b.c", "a/b-c", "a/ b"]
        for name in names:
            put(store, name, name.encode())
        found = list(store.list(""))
        assert [stat.key for stat in found] == sorted(names)
        assert [stat.length for stat in found] == [len(n.encode()) for n in sorted(names)]
        assert found == [store.stat(stat.key) for stat in found]

    def test_a_prefix_is_a_folder(self, store: Store) -> None:
        for key in ("version_1/a", "version_1/b/c", "version_10/a", "version_1.x", "version_2"):
            put(store, key, b"1")
        assert keys(store, "version_1") == ["version_1/a", "version_1/b/c"]
        assert keys(store, "version_1/b") == ["version_1/b/c"]
        assert keys(store, "version_2") == []
        assert keys(store, "version_") == []
        assert keys(store, "version_1/b/c/d") == []

    def test_where_nothing_is_nothing_is_listed(self, store: Store) -> None:
        for prefix in ("", "a", "a/b"):
            assert list(store.list(prefix)) == []
            assert list(store.partials(prefix)) == []

    def test_many_keys(self, store: Store) -> None:
        names = [f"v/{number:04}" for number in range(120)]
        for name in names:
            store.put_if_absent(name, b"")
        assert keys(store) == keys(store, "v") == names

    def test_what_partials_finds_can_be_deleted(self, store: Store) -> None:
        put(store, "v/a", b"1")
        upload = store.put("v/b", 5)
        upload.write_at(0, memoryview(b"12345"))
        for stat in store.partials("v"):
            assert stat.key.startswith("v/")
            store.delete(stat.key)
        assert leftovers(store) == []
        upload.abort()
        assert keys(store) == ["v/a"]

    def test_delete_removes_one_object_and_may_be_repeated(self, store: Store) -> None:
        for key in ("v/a", "v/b", "w"):
            put(store, key, b"1")
        for key in ("v/a", "v/a", "nothing", "v/a/b", "v"):
            store.delete(key)
        assert keys(store) == ["v/b", "w"]
        store.delete("v/b")
        assert keys(store) == ["w"]

    def test_a_key_is_free_again_after_delete(self, store: Store) -> None:
        store.put_if_absent("v/m", b"1")
        store.delete("v/m")
        store.put_if_absent("v/m", b"2")
        assert store.get("v/m", 1) == b"2"

    def test_put_and_delete_in_one_folder_do_not_meet(self, store: Store) -> None:
        def round_trip(number: int) -> None:
            for turn in range(5):
                key, data = f"v/{number}", b"%d" % turn
                store.put_if_absent(key, data)
                assert store.get(key, 9) == data
                store.delete(key)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(round_trip, range(8)))
        assert keys(store) == []

    # keys, traits

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_a_key_that_not_every_store_can_have_is_refused(self, store: Store, key: str) -> None:
        looks = [
            lambda: store.put(key, 1),
            lambda: store.put_if_absent(key, b"1"),
            lambda: store.delete(key),
            *self._looks(store, key),
        ]
        if key:
            looks += [lambda: list(store.list(key)), lambda: list(store.partials(key))]
        for look in looks:
            with pytest.raises(StoreError) as caught:
                look()
            assert not isinstance(caught.value, NotFound)
        self._nothing_is_left(store)

    @pytest.mark.parametrize("key", ["ü/日本/🙂", "a b", "%41", "a+b&c=d?e#f", "n" * 200, "-", "~"])
    def test_keys_of_all_kinds(self, store: Store, key: str) -> None:
        put(store, f"v/{key}", b"1")
        assert keys(store) == [f"v/{key}"]
        assert store.get(f"v/{key}", 1) == b"1"
        store.delete(f"v/{key}")
        assert keys(store) == []

    def test_traits_and_url(self, store: Store) -> None:
        assert store.traits.name
        assert store.traits.alignment >= 1
        assert isinstance(store.traits.durable, bool)
        assert store.url

    @staticmethod
    def _looks(store: Store, key: str) -> list[Callable[[], Any]]:
        return [
            lambda: store.get(key, _LIMIT),
            lambda: store.get_range(key, 0, 1, memoryview(bytearray(1))),
            lambda: store.get_range(key, 0, 0, memoryview(bytearray(1))),
            lambda: store.get_range(key, 0, 4096, Buffer(4096).view),
            lambda: store.stat(key),
        ]

    @staticmethod
    def _nothing_is_left(store: Store) -> None:
        assert keys(store) == []
        assert leftovers(store) == []

    @staticmethod
    def _names(error: HoldfastError, store: Store, key: str) -> None:
        assert (error.key, error.store) == (key, store.url)
        assert key in str(error)
        assert store.url in str(error)
