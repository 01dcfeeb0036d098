"""The public test kit, for tests of Limpet and of your own stores and file systems.

It needs pytest. ``StoreContract`` tests a store; ``CrashFs`` drops unsynced data at a power cut;
``FaultFs`` fails a chosen call.

Terms: a *contract* is a class of tests from which the tests of one implementation derive.
May import: the root modules and ``storage``.
"""

import pytest

pytest.register_assert_rewrite("limpet.testing.contract")

from limpet.testing.contract import StoreContract  # noqa: E402
from limpet.testing.crashfs import CrashFs, PowerCut  # noqa: E402
from limpet.testing.faults import Fault, FaultFs  # noqa: E402

__all__ = ["CrashFs", "Fault", "FaultFs", "PowerCut", "StoreContract"]
