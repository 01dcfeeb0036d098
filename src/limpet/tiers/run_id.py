"""The identity of a run, by which a training finds the states of this run in memory.

The URL is not enough: another run may follow at it. Nor is the record: a copied folder has it.
"""

from __future__ import annotations

import os

import msgspec

from limpet.errors import AlreadyExists, FormatError, NotFound, StoreError
from limpet.format.names import RUN_ID, is_attempt, random_id
from limpet.format.records import MAX_RECORD
from limpet.format.sealed import seal, unseal
from limpet.format.strict_json import StrictDecoder
from limpet.snapshot.location import get_bounded
from limpet.storage.local.store import LocalStore
from limpet.storage.store import MAX_PUTS, Store, contended_error


class RunId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record: a random number of 12 hexadecimal digits, and the local folder in which it was
    created, or an empty string."""

    id: str
    folder: str = ""


_RUN_ID = StrictDecoder(msgspec.json.Decoder(RunId))


def local_folder(store: Store) -> str:
    """Return the absolute path of the folder of a store, or an empty string if it has none."""
    return store.url if isinstance(store, LocalStore) else ""


def read_or_create_run_id(store: Store) -> str:
    """Return the identity of a run, a new one if the record is missing or damaged, or for the copy
    of a local folder whose original is there. Raises ``StoreError``."""
    folder = local_folder(store)
    for _ in range(MAX_PUTS):
        try:
            raw = get_bounded(store, RUN_ID, MAX_RECORD)
            record = unseal(raw, _RUN_ID, RUN_ID)[0]
            if is_attempt(record.id) and not _is_copy(folder, record, raw):
                return record.id
            store.delete(RUN_ID)
        except FormatError:
            store.delete(RUN_ID)
        except NotFound:
            pass
        created = random_id()
        try:
            store.put_if_absent(RUN_ID, seal(RunId(created, folder))[0])
            return created
        except AlreadyExists:  # another process was faster
            continue
    raise contended_error(RUN_ID, store.url)


def _is_copy(folder: str, record: RunId, raw: bytes) -> bool:
    """Return True if the folder in which the record was created still has it."""
    if not folder or not record.folder or folder == record.folder:
        return False
    try:
        if os.path.samefile(folder, record.folder):
            return False
        return get_bounded(LocalStore(record.folder), RUN_ID, MAX_RECORD) == raw
    except (OSError, FormatError, StoreError):
        return False
