"""The public test kit, for tests of Holdfast and of your own stores and file systems.

It needs pytest. ``StoreContract`` tests a store; ``CrashFs`` drops unsynced data at a power cut;
``FaultFs`` fails a chosen call.

Terms: a *contract* is a class of tests from which the tests of one implementation derive.
May import: the root modules and ``storage``.
"""

import pytest

pytest.register_assert_rewrite(
    "holdfast.testing.contract",
    "holdfast.testing.writing_contract",
    "holdfast.testing.store_contract",
)

from holdfast.testing.crashfs import CrashFs, PowerCut  # noqa: E402
from holdfast.testing.faults import Fault, FaultFs  # noqa: E402
from holdfast.testing.store_contract import StoreContract  # noqa: E402

__all__ = ["CrashFs", "Fault", "FaultFs", "PowerCut", "StoreContract"]
