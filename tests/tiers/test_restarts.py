"""The records of restarts: their names, their bytes, and that their number is bounded."""

import pytest
from msgspec.structs import replace

import limpet
from limpet.errors import Denied, DigestMismatch, FormatError, ManifestInvalid, Unavailable
from limpet.format.names import restart_name
from limpet.format.sealed import seal
from limpet.storage.memory import MemoryStore
from limpet.tiers.restarts import (
    MAX_DELETED,
    MAX_READ,
    Restart,
    decode_restart,
    delete_restarts,
    read_restarts,
    write_restart,
)
from tests import forging
from tests.unreliable_stores import HookedStore

RECORD = Restart(0, 50, "version_50", "a" * 32, None, None, "2026-01-02T03:04:05+00:00")
BACK = replace(RECORD, rung=2, skipped="version_60.1")


def key(rung=0, number=0):
    return restart_name(rung, f"{number:012x}")


@pytest.mark.parametrize(
    "changes",
    [
        {"rung": 1}, {"goal": -2}, {"goal": 10**18}, {"version": "version_0.0"},
        {"version": "../x"}, {"digest": "A" * 32}, {"created": "yesterday"},
        {"skipped": "version_60"}, {"tier": 1},
    ],
)  # fmt: skip
def test_a_record_that_violates_the_format_is_deleted_and_reported(changes):
    store, skipped = MemoryStore(), []
    raw = seal(replace(RECORD, **changes))[0]
    with pytest.raises(ManifestInvalid):
        decode_restart(raw, key())
    store.put_if_absent(key(), raw)
    write_restart(store, key(0, 1), RECORD)
    with limpet.attach(lambda name, fields: skipped.append((name, fields["version"]))):
        assert read_restarts(store) == {key(0, 1): RECORD}
    assert skipped == [("skipped", key())]
    assert [s.key for s in store.list("")] == [key(0, 1)]


def test_every_flipped_bit_and_every_length_is_found():
    raw = seal(RECORD)[0]
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1
        with pytest.raises((ManifestInvalid, DigestMismatch)):
            decode_restart(bytes(changed), key())
        with pytest.raises(FormatError):
            decode_restart(raw[:at], key())


def test_a_record_of_a_later_format_is_ignored_and_stays():
    store = MemoryStore()
    store.put_if_absent(key(), forging.seal(forging.sealed_content(seal(RECORD)[0]), 99))
    assert read_restarts(store) == {}
    assert len(list(store.list(""))) == 1


def test_of_ten_thousand_records_few_are_read_and_those_of_the_highest_rung_first():
    inner = MemoryStore()
    for number in range(10_000):
        inner.put_if_absent(key(0, number), b"damaged")
    write_restart(inner, key(2), BACK)
    store, calls = HookedStore(inner), list[str]()
    store.before = lambda method, _: calls.append(method)
    assert read_restarts(store)[key(2)] == BACK
    assert calls.count("get") == MAX_READ
    assert calls.count("delete") == MAX_READ - 1 + MAX_DELETED
    assert len(list(inner.list(""))) == 10_001 - (MAX_READ - 1 + MAX_DELETED)
    assert read_restarts(store)[key(2)] == BACK


@pytest.mark.parametrize(("error", "tried"), [(Unavailable("It is away"), 1), (Denied("No"), 5)])
def test_a_store_that_does_not_answer_is_asked_once(error, tried):
    store, calls = HookedStore(MemoryStore()), list[str]()

    def fail(_, deleted):
        calls.append(deleted)
        raise error

    store.before = fail
    delete_restarts(store, [key(0, number) for number in range(5)])
    assert len(calls) == tried
