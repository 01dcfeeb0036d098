"""The public test kit, for tests of Holdfast and of your own stores and file systems.

It needs pytest. ``StoreContract`` tests a store; ``CrashFs`` drops unsynced data at a power cut;
``FaultFs`` fails a chosen call; ``FakeGroup`` simulates ranks in threads.
May import: the root modules, ``storage``, and ``engine``.
"""

import pytest

pytest.register_assert_rewrite(
    "holdfast.testing.contract", "holdfast.testing.writing", "holdfast.testing.stores"
)

from holdfast.testing.crashfs import CrashFs, PowerCut  # noqa: E402
from holdfast.testing.faults import Fault, FaultFs  # noqa: E402
from holdfast.testing.stores import StoreContract  # noqa: E402

__all__ = ["CrashFs", "Fault", "FaultFs", "PowerCut", "StoreContract"]
