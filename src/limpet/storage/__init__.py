"""Store bytes under keys. A store knows nothing of tensors.

Terms: a *store* holds objects; an *upload* is an object that is not visible until it is committed.
``store.py`` states the contract, and ``limpet.testing.StoreContract`` tests it. The names below are
public: they are what a store of one's own needs. Each is imported on first use, as in ``limpet``.
May import: the root modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limpet.lazy_names import lazy_names

if TYPE_CHECKING:
    from limpet.storage.retry import (
        Remote as Remote,
        RemoteUpload as RemoteUpload,
        Reply as Reply,
        RetryStore as RetryStore,
        Server as Server,
    )
    from limpet.storage.store import (
        Entry as Entry,
        RangeReader as RangeReader,
        Stat as Stat,
        Store as Store,
        Traits as Traits,
        Upload as Upload,
        check_key as check_key,
        check_range as check_range,
        exists_error as exists_error,
        short_read_error as short_read_error,
        too_long_error as too_long_error,
    )
    from limpet.storage.uploads import (
        BufferedUpload as BufferedUpload,
        PartUpload as PartUpload,
        SequentialUpload as SequentialUpload,
    )

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "storage.retry": "Remote RemoteUpload Reply RetryStore Server",
        "storage.store": "Entry RangeReader Stat Store Traits Upload check_key check_range"
        " exists_error short_read_error too_long_error",
        "storage.uploads": "BufferedUpload PartUpload SequentialUpload",
    },
)
