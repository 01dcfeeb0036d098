"""The Store protocol as tests. To test your own store, derive a test class::

class TestMyStore(StoreContract):
    def make_store(self, folder):
        return MyStore(folder)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from limpet.buffers import Buffer
from limpet.errors import AlreadyExists, LimpetError, NotFound, StoreError
from limpet.storage.store import Stat, Store, Upload, list_level, part_length

_BAD_KEYS = ("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\0b", "k" * 901)


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


class StoreContract:
    """Tests of every MUST of ``limpet.storage.store.Store``.

    A subclass implements ``make_store(folder)``, which returns a new, empty store and may use the
    empty folder. ``put_sees_existing`` is True if ``put`` refuses a key that already exists. A
    store that cannot detect this cheaply sets it to False. ``partials_are_listed`` is True if
    ``partials`` shows unfinished uploads. A store in which they end with their process, and leave
    nothing, sets it to False. Without ``traits.atomic``, several racing writers may succeed;
    the object must be whole and that of one of them.
    """

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

    # reading

    def test_get_refuses_an_object_over_the_limit(self, store: Store) -> None:
        put(store, "a", b"12345")
        assert store.get("a", 5) == b"12345"
        with pytest.raises(StoreError) as caught:
            store.get("a", 4)
        assert not isinstance(caught.value, NotFound)
        self.assert_names(caught.value, store, "a")

    def test_a_missing_key_raises_not_found(self, store: Store) -> None:
        put(store, "v/a", b"1")
        for key in ("w", "v/b", "v", "w/x/y"):
            for read_key in self.reads(store, key):
                with pytest.raises(NotFound) as caught:
                    read_key()
                self.assert_names(caught.value, store, key)

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 12_000])
    @pytest.mark.parametrize("length", [0, 1, 4096, 5000, 8000])
    def test_ranges(self, store: Store, offset: int, length: int) -> None:
        data = random_bytes(20_000)
        put(store, "a", data)
        for capacity in (length, length + 1, length + 8192):
            buffer = Buffer(32_768)
            store.get_range("a", offset, length, buffer.view[:capacity])
            assert buffer.view[:length] == data[offset : offset + length]

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
        put(store, "v/a", random_bytes(10_001))
        with pytest.raises(StoreError, match=str(length)) as caught:
            store.get_range("v/a", offset, length, Buffer(16_384).view)
        assert str(found) in str(caught.value)
        assert str(offset) in str(caught.value)
        self.assert_names(caught.value, store, "v/a")

    @pytest.mark.parametrize(("offset", "length", "capacity"), [(-1, 1, 9), (0, -1, 9), (0, 10, 9)])
    def test_an_invalid_range_is_an_error(
        self, store: Store, offset: int, length: int, capacity: int
    ) -> None:
        put(store, "a", random_bytes(100))
        with pytest.raises(StoreError):
            store.get_range("a", offset, length, memoryview(bytearray(capacity)))

    @pytest.mark.parametrize("lengths", [(1, 1), (4096, 5000, 3), (0, 7, 0, 9000, 0), (9000, 4096)])
    @pytest.mark.parametrize("offset", [0, 1, 4096])
    def test_a_range_that_is_read_in_steps(
        self, store: Store, offset: int, lengths: tuple[int, ...]
    ) -> None:
        if not store.traits.read_size:
            pytest.skip("a store without a read_size is asked for each step")
        data, total = random_bytes(20_000), sum(lengths)
        put(store, "a", data)

        def read_in_steps(offset: int, length: int) -> bytes:
            found, buffer = [], Buffer(16_384)  # one buffer for all steps
            with store.open_range("a", offset, length) as reader:  # type: ignore[attr-defined]
                for size in lengths:
                    reader.read_into(buffer.view[:size])
                    found.append(bytes(buffer.view[:size]))
            return b"".join(found)

        for length in (total, total + 1, 19_000 - offset):  # those that go on are abandoned
            assert read_in_steps(offset, length) == data[offset : offset + total]
        with pytest.raises(StoreError, match=f"Expected {total - 1} bytes"):
            read_in_steps(offset, total - 1)
        with pytest.raises(StoreError, match="too short") as caught:
            read_in_steps(20_001 - total, total)
        assert str(20_001 - total) in str(caught.value)
        self.assert_names(caught.value, store, "a")
        assert read_in_steps(20_000 - total, total) == data[20_000 - total :]
        for start, count in ((-1, 2), (0, -1)):
            with pytest.raises(StoreError, match="Invalid range"):
                store.open_range("a", start, count)  # type: ignore[attr-defined]

    def test_ranges_are_read_by_many_threads(self, store: Store) -> None:
        data, piece = random_bytes(1_000_001), 40_000
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
        stats = list(store.list(""))
        assert [stat.key for stat in stats] == sorted(names)
        assert [stat.length for stat in stats] == [len(n.encode()) for n in sorted(names)]
        assert stats == [store.stat(stat.key) for stat in stats]

    def test_a_prefix_is_a_folder(self, store: Store) -> None:
        for key in ("version_1/a", "version_1/b/c", "version_10/a", "version_1.x", "version_2"):
            put(store, key, b"1")
        assert keys(store, "version_1") == ["version_1/a", "version_1/b/c"]
        assert keys(store, "version_1/b") == ["version_1/b/c"]
        for prefix in ("version_2", "version_", "version_1/b/c/d"):
            assert keys(store, prefix) == []

    def test_a_level_is_what_is_directly_in_a_folder(self, store: Store) -> None:
        for key in ("version_1/a", "version_1/b/c", "version_10/d/e", "version_1.x", "z"):
            put(store, key, key.encode())
        upload = store.put("version_1/unfinished", 1)
        level = {
            folder: sorted((e.name, e.kind) for e in list_level(store, folder))
            for folder in ("", "version_1", "version_1/b", "version_10", "z", "none", "z/none")
        }
        folders = [("version_1", "folder"), ("version_1.x", "object"), ("version_10", "folder")]
        assert level.pop("") == [*folders, ("z", "object")]
        assert level.pop("version_1") == [("a", "object"), ("b", "folder")]
        assert level.pop("version_1/b") == [("c", "object")]
        assert level.pop("version_10") == [("d", "folder")]
        assert not any(level.values())
        begins = {
            prefix: sorted(e.name for e in list_level(store, "", prefix))
            for prefix in ("version_1", "version_10", "version_1/", "x", "z")
        }
        assert begins == {
            "version_1": ["version_1", "version_1.x", "version_10"],
            "version_10": ["version_10"],
            "version_1/": [],
            "x": [],
            "z": ["z"],
        }
        assert [e.name for e in list_level(store, "version_1", "b")] == ["b"]
        for entry in list_level(store, "version_1"):
            if entry.stat is not None:
                assert entry.stat == store.stat(f"version_1/{entry.name}")
        upload.abort()

    def test_a_level_shows_each_change(self, store: Store) -> None:
        for number in range(20):
            store.put_if_absent(f"v/{number}/a", b"")
            assert len(list(list_level(store, "v"))) == number + 1
        for number in range(20):
            store.delete(f"v/{number}/a")
        assert list(list_level(store, "v")) == []

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        for prefix in ("", "a", "a/b"):
            assert list(store.list(prefix)) == []
            assert list(list_level(store, prefix)) == []
            assert list(store.partials(prefix)) == []

    def test_partials_can_be_deleted(self, store: Store) -> None:
        put(store, "v/a", b"1")
        upload = store.put("v/b", 5)
        upload.write_at(0, memoryview(b"12345"))
        for stat in store.partials("v"):
            assert stat.key.startswith("v/")
            store.delete(stat.key)
        assert partial_keys(store) == []
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

    def test_concurrent_put_and_delete_in_one_folder(self, store: Store) -> None:
        def round_trip(number: int) -> None:
            for i in range(5):
                key, data = f"v/{number}", b"%d" % i
                store.put_if_absent(key, data)
                assert store.get(key, 9) == data
                store.delete(key)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(round_trip, range(8)))
        assert keys(store) == []

    # keys, traits

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_an_invalid_key_is_refused(self, store: Store, key: str) -> None:
        calls = [
            lambda: store.put(key, 1),
            lambda: store.put_if_absent(key, b"1"),
            lambda: store.delete(key),
            *self.reads(store, key),
        ]
        if key:
            calls += [lambda: list(store.list(key)), lambda: list(store.partials(key))]
            calls += [lambda: list(list_level(store, key))]
        for call in calls:
            with pytest.raises(StoreError) as caught:
                call()
            assert not isinstance(caught.value, NotFound)
        self.assert_empty(store)

    @pytest.mark.parametrize("key", ["ü/日本/🙂", "a b", "%41", "a+b&c=d?e#f", "n" * 200, "-", "~"])
    def test_unusual_keys(self, store: Store, key: str) -> None:
        put(store, f"v/{key}", b"1")
        assert keys(store) == [f"v/{key}"]
        assert store.get(f"v/{key}", 1) == b"1"
        store.delete(f"v/{key}")
        assert keys(store) == []

    def test_a_view_of_a_folder_has_the_keys_below_it(self, store: Any) -> None:
        if not hasattr(store, "at"):
            pytest.skip("a store without the optional method at")
        view = store.at("a").at("b/c")
        assert view.url in (f"{store.url}/a/b/c", f"{store.url}a/b/c")
        put(view, "v/f", b"22")
        view.put_if_absent("v/m", b"1")
        store.put_if_absent("a/b/n", b"other")
        assert keys(store) == ["a/b/c/v/f", "a/b/c/v/m", "a/b/n"]
        assert keys(view) == ["v/f", "v/m"]
        assert sorted(e.name for e in list_level(view, "v")) == ["f", "m"]
        assert (view.stat("v/f").key, view.get("v/m", 1)) == ("v/f", b"1")
        assert read(view, "v/f", 1, 1) == b"2"
        view.delete("v/m")
        assert keys(store, "a/b/c") == ["a/b/c/v/f"]
        for folder in ("", "..", "/a"):
            with pytest.raises(StoreError):
                store.at(folder)

    def test_traits_and_url(self, store: Store) -> None:
        assert store.traits.name
        assert store.traits.alignment >= 1
        assert isinstance(store.traits.durable, bool)
        assert store.url

    @staticmethod
    def part_length(store: Store) -> int:
        """Return the length of the parts of an object of a few parts, if it had some."""
        return part_length(store.traits, 1)

    @staticmethod
    def write_and_commit(upload: Upload, offset: int, data: bytes) -> None:
        upload.write_at(offset, memoryview(data))
        upload.commit()

    # put

    @pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 100_000, (3 << 20) + 5])
    def test_an_object_is_read_back(self, store: Store, size: int) -> None:
        data = random_bytes(size)
        stat = put(store, "v/a", data)
        assert (stat.key, stat.length) == ("v/a", size)
        assert stat == store.stat("v/a")
        assert store.get("v/a", size) == read(store, "v/a", 0, size) == data
        assert keys(store) == ["v/a"]
        assert partial_keys(store) == []

    def test_pieces_need_not_be_aligned(self, store: Store) -> None:
        data, cuts = random_bytes(50_000), [0, 1, 4095, 4097, 12_288, 20_481, 49_999, 50_000]
        buffer = Buffer(65_536)
        with store.put("a", len(data)) as upload:
            for start, end in pairwise(cuts):
                buffer.view[: end - start] = data[start:end]
                upload.write_at(start, buffer.view[: end - start])
            upload.commit()
        assert store.get("a", len(data)) == data

    def test_a_buffer_may_be_reused_after_write_at_returns(self, store: Store) -> None:
        buffer = Buffer(8192)
        with store.put("a", 16_384) as upload:
            for at, byte in ((8192, b"2"), (0, b"1")):
                buffer.view[:] = byte * 8192
                upload.write_at(at, buffer.view)
            buffer.view[:] = b"3" * 8192
            upload.commit()
        assert store.get("a", 16_384) == b"1" * 8192 + b"2" * 8192

    def test_memory_of_any_element_type_is_written_as_bytes(self, store: Store) -> None:
        data = random_bytes(96)
        with store.put("a", 96) as upload:
            upload.write_at(0, cast(Any, memoryview(data).cast("d", (3, 4))))
            upload.commit()
        assert store.get("a", 96) == data

    @pytest.mark.parametrize(
        ("pieces", "message"), [({0: b"01234", 6: b"6789"}, "byte 5"), ({0: b"01234"}, ".")]
    )
    def test_a_missing_byte_is_an_error_at_commit(
        self, store: Store, pieces: dict[int, bytes], message: str
    ) -> None:
        with store.put("v/a", 10) as upload:
            for offset, piece in pieces.items():
                upload.write_at(offset, memoryview(piece))
            with pytest.raises(StoreError, match=message):
                upload.commit()
        self.assert_empty(store)

    @pytest.mark.parametrize("pieces", [((0, 4), (1, 1)), ((0, 4), (0, 4)), ((0, 3), (2, 2))])
    def test_a_byte_written_twice_is_an_error(
        self, store: Store, pieces: tuple[tuple[int, int], ...]
    ) -> None:
        def write(upload: Upload) -> None:
            for offset, size in pieces:
                upload.write_at(offset, memoryview(b"0123")[:size])
            upload.commit()

        with store.put("v/a", 4) as upload, pytest.raises(StoreError):
            write(upload)
        self.assert_empty(store)

    @pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 11), (10, 1), (9, 2)])
    def test_a_piece_outside_the_object_is_an_error(
        self, store: Store, offset: int, size: int
    ) -> None:
        with store.put("v/a", 10) as upload, pytest.raises(StoreError):
            upload.write_at(offset, memoryview(bytes(size)))
        with pytest.raises(StoreError):
            store.put("a", -1)
        self.assert_empty(store)

    def test_nothing_is_visible_before_commit(self, store: Store) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
            assert keys(store) == []
            for call in (lambda: store.stat("v/a"), lambda: store.get("v/a", 9)):
                with pytest.raises(NotFound):
                    call()
            upload.commit()
        assert keys(store) == ["v/a"]

    def test_abort_leaves_nothing_and_may_be_repeated(self, store: Store) -> None:
        upload = store.put("v/a", 3)
        upload.write_at(0, memoryview(b"abc"))
        upload.abort()
        upload.abort()
        self.assert_empty(store)
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
        self.assert_empty(store)
        with pytest.raises(KeyError), store.put("v/a", 3):
            raise KeyError
        self.assert_empty(store)

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_an_ended_upload_refuses_calls(self, store: Store, end: str) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
            getattr(upload, end)()
            for call in (upload.commit, lambda: upload.write_at(0, memoryview(b""))):
                with pytest.raises(StoreError):
                    call()
            upload.abort()
        assert keys(store) == (["v/a"] if end == "commit" else [])

    def test_abort_while_threads_write(self, store: Store) -> None:
        upload, data = store.put("v/a", 64 * 4096), memoryview(bytes(4096))

        def write(at: int) -> None:
            try:
                upload.write_at(at, data)
            except StoreError:
                return  # the upload was aborted before this piece

        with ThreadPoolExecutor(4) as threads:
            writes = [threads.submit(write, at * 4096) for at in range(64)]
            upload.abort()
            for future in writes:
                future.result()
        self.assert_empty(store)

    @pytest.mark.parametrize("head", [0, 5000, 9 << 20])
    def test_whole_parts_in_several_views(self, store: Store, head: int) -> None:
        part = self.part_length(store)
        data = memoryview(random_bytes(head + 2 * part + 1000))
        cuts = [0, head + part, head + 2 * part, len(data)]

        def write(start: int, stop: int) -> None:
            middle = (start + stop) // 2
            if store.traits.part_size:
                upload.write_at(start, data[start:middle], data[middle:stop])
            else:
                upload.write_at(start, data[start:stop])

        with begin(store, "v/a", len(data), head) as upload, ThreadPoolExecutor(3) as threads:
            list(threads.map(write, cuts[-2::-1], cuts[:0:-1]))
            assert keys(store) == []
            stat = upload.commit()
        assert stat == store.stat("v/a")
        assert store.get("v/a", len(data)) == data
        assert partial_keys(store) == []

    @pytest.mark.parametrize("piece", [65_536, 777_777])
    def test_small_pieces_of_a_large_object_in_any_order(self, store: Store, piece: int) -> None:
        data = memoryview(random_bytes(2 * self.part_length(store) + 77))
        starts = list(range(0, len(data), piece))
        random.Random(2).shuffle(starts)
        with begin(store, "v/a", len(data), 100) as upload, ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda at: upload.write_at(at, data[at : at + piece]), starts))
            upload.commit()
        assert store.get("v/a", len(data)) == data

    def test_an_unfinished_large_upload_can_be_deleted(self, store: Store) -> None:
        if not self.partials_are_listed:
            pytest.skip("unfinished uploads of this store leave nothing")
        part = self.part_length(store)
        with store.put("v/a", 3 * part) as upload, store.put("v/b", 3 * part) as other:
            for begun in (upload, other):
                begun.write_at(0, memoryview(bytes(part)))
            partials = {key for key in partial_keys(store) if "v/b" not in key and ".b." not in key}
            assert len(partials) == 1
            for key in partials:
                store.delete(key)
            assert len(partial_keys(store)) == 1
            with pytest.raises(StoreError):
                self.write_and_commit(upload, part, bytes(2 * part))
            other.write_at(part, memoryview(bytes(2 * part)))
            other.commit()
        assert keys(store) == ["v/b"]
        assert partial_keys(store) == []

    def test_a_large_object_with_a_hole_is_not_committed(self, store: Store) -> None:
        part = self.part_length(store)
        with store.put("v/a", 3 * part) as upload:
            upload.write_at(2 * part, memoryview(bytes(part)))
            with pytest.raises(StoreError, match="byte 0"):
                upload.commit()
        self.assert_empty(store)

    def test_concurrent_uploads_are_independent(self, store: Store) -> None:
        def put_and_compare(number: int) -> bool:
            data = random_bytes(20_000, number)
            put(store, f"v/{number}", data)
            return store.get(f"v/{number}", len(data)) == data

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(put_and_compare, range(16)))
        assert len(keys(store)) == 16

    def test_put_does_not_overwrite(self, store: Store) -> None:
        if not self.put_sees_existing:
            pytest.skip("put of this store does not detect an existing object")
        put(store, "v/a", b"first")
        with pytest.raises(AlreadyExists):
            put(store, "v/a", b"first")
        assert store.get("v/a", 9) == b"first"
        assert partial_keys(store) == []

    @pytest.mark.parametrize("in_one_call", [True, False])
    @pytest.mark.parametrize("key", ["v/a/b", "v/a/b/c"])
    def test_an_object_stays_unchanged_when_another_one_is_put_below_it(
        self, store: Store, key: str, in_one_call: bool
    ) -> None:
        """A store of files cannot have both, and neither the failure nor its cleanup harms the
        first. An object store has both."""
        first = put(store, "v/a", b"first")
        expected = ["v/a"]
        with suppress(StoreError):
            if in_one_call:
                store.put_if_absent(key, b"second")
            else:
                put(store, key, b"second")
            expected.append(key)
            assert store.get(key, 9) == b"second"
        assert keys(store) == expected
        assert partial_keys(store) == []
        store.delete(key)
        assert keys(store) == ["v/a"]
        assert store.stat("v/a") == first
        assert store.get("v/a", 9) == b"first"

    # put_if_absent

    @pytest.mark.parametrize("size", [0, 1, 5000, 300_000])
    def test_put_if_absent_writes_the_whole_object(self, store: Store, size: int) -> None:
        stat = store.put_if_absent("v/m", random_bytes(size))
        assert stat.length == size
        assert store.stat("v/m") == stat
        assert store.get("v/m", size) == random_bytes(size)
        assert partial_keys(store) == []

    def test_put_if_absent_keeps_the_existing_object(self, store: Store) -> None:
        store.put_if_absent("v/m", b"first")
        assert store.put_if_absent("v/m", b"first").length == 5
        for other in (b"other", b"", b"first and more"):
            with pytest.raises(AlreadyExists) as caught:
                store.put_if_absent("v/m", other)
            self.assert_names(caught.value, store, "v/m")
        assert store.get("v/m", 99) == b"first"
        assert partial_keys(store) == []

    def test_one_of_sixteen_racing_writers_wins(self, store: Store) -> None:
        def race(number: int) -> int | None:
            try:
                store.put_if_absent("v/m", b"%d" % number * 1000)
            except AlreadyExists:
                return None
            return number

        for _ in range(3):
            with ThreadPoolExecutor(16) as threads:
                winners = [n for n in threads.map(race, range(10, 26)) if n is not None]
            if store.traits.atomic:
                assert len(winners) == 1
            assert store.get("v/m", 2000) in [b"%d" % number * 1000 for number in winners]
            assert partial_keys(store) == []
            store.delete("v/m")

    def test_sixteen_racing_writers_of_the_same_bytes_all_succeed(self, store: Store) -> None:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda _: store.put_if_absent("v/m", b"same"), range(16)))
        assert store.get("v/m", 9) == b"same"
