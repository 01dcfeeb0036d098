"""Cut the power at every call of LocalStore.

Writes that have returned survive. Other objects are complete or absent.
"""

import random
from contextlib import suppress

import pytest

from limpet.errors import AlreadyExists
from limpet.storage.local.store import LocalStore
from limpet.testing.contract import keys, put, random_bytes
from limpet.testing.crashfs import CrashFs, PowerCut

SIZE = 2 * 4096 + 100
DATA, OTHER = random_bytes(SIZE), random_bytes(SIZE, 1)


def put_in_pieces(store, key):
    with store.put(key, SIZE) as upload:
        for at in (4096, 0, 8192):
            upload.write_at(at, memoryview(DATA)[at : min(at + 4096, SIZE)])
        upload.commit()


def put_if_absent(store, key):
    store.put_if_absent(key, DATA)


WRITERS = pytest.mark.parametrize("write", [put_in_pieces, put_if_absent])


def cut_at_every_call(work):
    """Run ``work(fs, done)`` once for each of its calls, and cut the power before that call.

    Yield each file system that the crash may leave, with the keys that ``done`` had recorded.
    """
    for cut_at in range(1, 1000):
        fs, done = CrashFs(cut_at), []
        try:
            work(fs, done)
        except PowerCut:
            for left in fs.crashes(limit=24, seed=cut_at):
                yield left, done
        else:
            fs.cut_at = None
            for left in fs.crashes(limit=64):
                yield left, done
            return
    pytest.fail("the number of calls is unlimited")


def check(left, done, root="/a/run"):
    store = LocalStore(root, fs=left)
    found = keys(store)
    for key in found:
        assert store.get(key, SIZE) == DATA, key
    assert set(done) <= set(found)


@WRITERS
def test_one_object_in_new_folders(write):
    def work(fs, done):
        write(LocalStore("/a/run", fs=fs), "v/w/a")
        done.append("v/w/a")

    states = 0
    for left, done in cut_at_every_call(work):
        check(left, done)
        states += 1
    assert states > 200


@WRITERS
def test_a_folder_that_another_process_created_but_did_not_sync(write):
    def work(fs, done):
        other = LocalStore("/a/run", fs=fs).put("v/other", SIZE)
        write(LocalStore("/a/run", fs=fs), "v/a")
        done.append("v/a")
        other.abort()

    for left, done in cut_at_every_call(work):
        check(left, done)


def test_a_new_root_is_synced_although_the_first_upload_was_aborted():
    def work(fs, done):
        store = LocalStore("/a/run", fs=fs)
        store.put("v/other", SIZE).abort()
        put_if_absent(store, "v/a")
        done.append("v/a")

    for left, done in cut_at_every_call(work):
        check(left, done)


def test_a_root_that_was_deleted_and_created_again():
    def work(fs, done):
        store = LocalStore("/a/run", fs=fs)
        put_if_absent(store, "a")
        store.delete("a")
        fs.rmdir("/a/run")
        fs.rmdir("/a")
        put_if_absent(store, "v/a")
        done.append("v/a")

    for left, done in cut_at_every_call(work):
        check(left, done)


def test_equal_writes_of_two_processes_are_durable_when_either_returns():
    def work(fs, done):
        first, second = LocalStore("/a/run", fs=fs), LocalStore("/a/run", fs=fs)
        upload = first.put("v/a", SIZE)
        upload.write_at(0, memoryview(DATA))
        first.sync_folders = lambda folder: (put_if_absent(second, "v/a"), done.append("v/a"))
        upload.commit()

    for left, done in cut_at_every_call(work):
        check(left, done)


def test_deleted_objects_stay_deleted_and_others_survive():
    def work(fs, done):
        store = LocalStore("/a/run", fs=fs)
        for key in ("v/a", "v/b", "w/c"):
            put(store, key, DATA)
        done.extend(["v/a", "v/b", "w/c"])
        for key in ("v/a", "w/c", "v/b"):
            done.remove(key)
            store.delete(key)
            done.append("-" + key)

    for left, done in cut_at_every_call(work):
        check(left, [key for key in done if not key.startswith("-")])
        gone = {key[1:] for key in done if key.startswith("-")}
        assert not gone & set(keys(LocalStore("/a/run", fs=left)))


@WRITERS
def test_a_store_is_usable_after_a_crash(write):
    def work(fs, done):
        write(LocalStore("/a/run", fs=fs), "v/a")
        done.append("v/a")

    for left, _ in cut_at_every_call(work):
        store = LocalStore("/a/run", fs=left)
        for partial in store.partials(""):
            store.delete(partial.key)
        if not keys(store):
            write(store, "v/a")
        for again in left.crashes(limit=4):
            check(again, ["v/a"])


def test_two_writers_never_leave_a_mixture():
    def work(fs, done):
        for data in (DATA, OTHER):
            with suppress(AlreadyExists):
                LocalStore("/r", fs=fs).put_if_absent("m", data)
                done.append(data)

    for left, done in cut_at_every_call(work):
        store = LocalStore("/r", fs=left)
        found = [store.get(key, SIZE) for key in keys(store)]
        assert found in ([], [DATA], [OTHER])
        assert not done or found == done[:1]


@pytest.mark.slow
def test_a_long_history_with_a_random_power_cut():
    for seed in range(60):
        rng = random.Random(seed)
        fs, existing = CrashFs(rng.randrange(5, 400)), set()
        store, uncertain = LocalStore("/a/run", fs=fs), set()
        try:
            while True:
                key = f"v{rng.randrange(3)}/{rng.randrange(4)}"
                uncertain = {key}
                if key in existing and rng.random() < 0.6:
                    store.delete(key)
                    existing.discard(key)
                elif key not in existing:
                    rng.choice([put_in_pieces, put_if_absent])(store, key)
                    existing.add(key)
        except PowerCut:
            for left in fs.crashes(limit=16, seed=seed):
                check(left, existing - uncertain)
                assert set(keys(LocalStore("/a/run", fs=left))) <= existing | uncertain
