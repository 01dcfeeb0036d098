"""The Store protocol as tests. To test your own store, derive a test class::

class TestMyStore(StoreContract):
    def make_store(self, folder):
        return MyStore(folder)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from limpet.buffers import Buffer
from limpet.errors import NotFound, StoreError
from limpet.storage.store import Store, list_level
from limpet.testing.contract import keys, partial_keys, put, random_bytes, read
from limpet.testing.writing_contract import WritingContract

_BAD_KEYS = ("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\0b", "k" * 901)


class StoreContract(WritingContract):
    """Tests of every MUST of ``limpet.storage.store.Store``.

    A subclass implements ``make_store(folder)``, which returns a new, empty store and may use the
    empty folder. ``put_sees_existing`` is True if ``put`` refuses a key that already exists. A
    store that cannot detect this cheaply sets it to False. ``partials_are_listed`` is True if
    ``partials`` shows unfinished uploads. A store in which they end with their process, and leave
    nothing, sets it to False. Without ``traits.atomic``, several racing writers may succeed;
    the object must be whole and that of one of them.
    """

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

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 8192, 12_000])
    @pytest.mark.parametrize("length", [0, 1, 4096, 5000, 8000])
    def test_ranges(self, store: Store, offset: int, length: int) -> None:
        data = random_bytes(20_000)
        put(store, "a", data)
        for capacity in (length, length + 1, length + 8192):
            buffer = Buffer(32_768)
            store.get_range("a", offset, length, buffer.view[:capacity])
            assert buffer.view[:length] == data[offset : offset + length]

    def test_a_range_up_to_the_end(self, store: Store) -> None:
        data = random_bytes(10_001)
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

    def test_many_keys(self, store: Store) -> None:
        names = [f"v/{number:04}" for number in range(120)]
        for name in names:
            store.put_if_absent(name, b"")
        assert keys(store) == keys(store, "v") == names

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

    def test_a_key_can_be_written_again_after_delete(self, store: Store) -> None:
        store.put_if_absent("v/m", b"1")
        store.delete("v/m")
        store.put_if_absent("v/m", b"2")
        assert store.get("v/m", 1) == b"2"

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

    def test_traits_and_url(self, store: Store) -> None:
        assert store.traits.name
        assert store.traits.alignment >= 1
        assert isinstance(store.traits.durable, bool)
        assert store.url
