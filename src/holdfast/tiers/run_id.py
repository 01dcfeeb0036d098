"""The identity of a run, by which a training finds the states of this run in memory.

The URL is not enough: after a run was deleted, another one with the same URL must not resume from
the states of the first.
"""

from __future__ import annotations

import msgspec

from holdfast.engine.snapshot.location import get_bounded
from holdfast.errors import AlreadyExists, FormatError, NotFound
from holdfast.format.names import RUN_ID, is_attempt, random_id
from holdfast.format.records import MAX_RECORD
from holdfast.format.sealed import seal, unseal
from holdfast.format.strict_json import StrictDecoder
from holdfast.storage.checks import MAX_PUTS, contended_error
from holdfast.storage.store import Store


class RunId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record: a random number of 12 hexadecimal digits."""

    id: str


_RUN_ID = StrictDecoder(msgspec.json.Decoder(RunId))


def read_or_create_run_id(store: Store) -> str:
    """Return the identity of a run. It is created if there is none, or if the record is damaged.

    Raises ``StoreError``.
    """
    for _ in range(MAX_PUTS):
        try:
            run_id = unseal(get_bounded(store, RUN_ID, MAX_RECORD), _RUN_ID, RUN_ID)[0].id
            if is_attempt(run_id):
                return run_id
            store.delete(RUN_ID)
        except FormatError:
            store.delete(RUN_ID)
        except NotFound:
            pass
        created = random_id()
        try:
            store.put_if_absent(RUN_ID, seal(RunId(created))[0])
            return created
        except AlreadyExists:  # another process was faster
            continue
    raise contended_error(RUN_ID, store.url)
