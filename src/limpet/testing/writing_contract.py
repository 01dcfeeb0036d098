"""The tests of ``put`` and ``put_if_absent`` in the Store contract."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest

from limpet.buffers import Buffer
from limpet.errors import AlreadyExists, NotFound, StoreError
from limpet.storage.store import Store, Upload, part_length
from limpet.testing.contract import Contract, begin, keys, partial_keys, put, random_bytes, read


class WritingContract(Contract):
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
        assert store.get("v/a", size) == read(store, "v/a", 0, size) == data
        assert keys(store) == ["v/a"]
        assert partial_keys(store) == []

    def test_commit_returns_the_stat(self, store: Store) -> None:
        assert put(store, "v/a", b"abc") == store.stat("v/a")

    def test_an_empty_object_needs_no_write(self, store: Store) -> None:
        with store.put("empty", 0) as upload:
            upload.commit()
        assert store.get("empty", 0) == b""

    def test_pieces_in_any_order_from_many_threads(self, store: Store) -> None:
        data, piece = random_bytes(2_000_003), 65_536
        starts = list(range(0, len(data), piece))
        random.Random(1).shuffle(starts)
        view = memoryview(data)
        with store.put("v/a", len(data)) as upload, ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda at: upload.write_at(at, view[at : at + piece]), starts))
            upload.commit()
        assert store.get("v/a", len(data)) == data

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
        self.assert_empty(store)

    def test_a_negative_length_is_an_error(self, store: Store) -> None:
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

    def test_leaving_the_context_without_commit_aborts(self, store: Store) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
        self.assert_empty(store)
        with pytest.raises(KeyError), store.put("v/a", 3):
            raise KeyError
        self.assert_empty(store)

    def test_abort_after_commit_changes_nothing(self, store: Store) -> None:
        with store.put("v/a", 3) as upload:
            upload.write_at(0, memoryview(b"abc"))
            upload.commit()
            upload.abort()
        assert store.get("v/a", 3) == b"abc"

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_an_ended_upload_refuses_calls(self, store: Store, end: str) -> None:
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

    def test_small_pieces_of_a_large_object_in_any_order(self, store: Store) -> None:
        data = memoryview(random_bytes(2 * self.part_length(store) + 77))
        starts = list(range(0, len(data), 777_777))
        random.Random(2).shuffle(starts)
        with begin(store, "v/a", len(data), 100) as upload, ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda at: upload.write_at(at, data[at : at + 777_777]), starts))
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
        """A store of files cannot have both. Neither the failure nor its cleanup harms the first.

        In an object store, both exist.
        """
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
        for other in (b"other", b"", b"first and more"):
            with pytest.raises(AlreadyExists) as caught:
                store.put_if_absent("v/m", other)
            self.assert_names(caught.value, store, "v/m")
        assert store.get("v/m", 99) == b"first"
        assert partial_keys(store) == []

    def test_put_if_absent_of_the_same_bytes_succeeds(self, store: Store) -> None:
        store.put_if_absent("v/m", b"same")
        assert store.put_if_absent("v/m", b"same").length == 4
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
