"""The records of the restarts of a run: small sealed files, written once and deleted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from limpet import events
from limpet.errors import FormatError, FormatTooNew, NotFound, StoreError, Unavailable
from limpet.format.digest import Digest
from limpet.format.names import MAX_STEP, VersionName, is_restart_name
from limpet.format.sealed import is_utc_time, require, seal, unseal
from limpet.format.strict_json import StrictDecoder
from limpet.snapshot.location import get_bounded
from limpet.storage.store import Store, list_level
from limpet.tiers.inventory import WHERE, TierName

MAX_READ = 32
"""The number of records that a resume reads. The ladder itself leaves at most nine."""

MAX_DELETED = 100
"""The number of surplus records that a resume deletes."""

_MAX_RECORD = 4096


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a restart resumed from, and on which rung of the ladder."""

    rung: Annotated[int, Meta(ge=0, le=2)]
    goal: Annotated[int, Meta(ge=-1, le=MAX_STEP)]  # only a state after a later step is progress
    version: VersionName | None  # that was loaded; None: there was none
    digest: Digest | None
    tier: TierName | None  # None: the run itself
    skipped: VersionName | None  # left behind, on the last rung
    created: str  # for people
    has_nan: bool = False  # a metric was NaN soon after the load

    def __str__(self) -> str:
        """``2026-01-02T03:04:05+00:00 from version_50 in memory``."""
        origin = "an empty run" if self.version is None else self.version
        where = f" {WHERE[self.tier]}" if self.tier else ""
        return f"{self.created} from {origin}{where}{', then NaN' if self.has_nan else ''}"


_RESTART = StrictDecoder(msgspec.json.Decoder(Restart))


def write_restart(store: Store, key: str, restart: Restart) -> None:
    """Write a record. Raises ``StoreError``."""
    store.put_if_absent(key, seal(restart)[0])


def read_restarts(store: Store) -> dict[str, Restart]:
    """Return the records of a run by key; of too many, those of the highest rungs. Deletes damaged
    and surplus ones, of which the event ``skipped`` reports the damaged. Raises ``StoreError``."""
    entries = list_level(store, "", "restart-")
    keys = [e.name for e in entries if is_restart_name(e.name) and e.kind != "folder"]
    keys.sort(reverse=True)  # the rung comes first in the name
    found, surplus = dict[str, Restart](), keys[MAX_READ : MAX_READ + MAX_DELETED]
    for key in keys[:MAX_READ]:
        try:
            found[key] = decode_restart(get_bounded(store, key, _MAX_RECORD), key)
        except NotFound:  # another process has deleted it
            continue
        except FormatError as e:
            events.emit("skipped", version=key, error=e)
            if not isinstance(e, FormatTooNew):
                surplus.append(key)
    delete_restarts(store, surplus)
    return found


def decode_restart(raw: bytes, file: str) -> Restart:
    """Return a checked record. Raises the same errors as ``decode_manifest``."""
    restart = unseal(raw, _RESTART, file)[0]
    require(file, is_utc_time(restart.created), "a time in UTC in `created`", restart.created)
    is_own = file.startswith(f"restart-{restart.rung}-")
    require(file, is_own, f"a name that begins with restart-{restart.rung}-", file)
    is_back = restart.rung == 2
    require(file, is_back == (restart.skipped is not None), "`skipped` on rung 2 only", restart)
    return restart


def delete_restarts(store: Store, keys: Iterable[str]) -> None:
    """Delete records. What the store does not delete is looked at again by the next resume."""
    for key in keys:
        try:
            store.delete(key)
        except Unavailable:
            return  # each of the others would wait as long
        except StoreError:
            continue
