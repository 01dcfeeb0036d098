"""What tests of Holdfast, and of stores and file systems of your own, are made with.

Needs pytest.
"""

import pytest

pytest.register_assert_rewrite(
    "holdfast.testing.contract", "holdfast.testing.writing", "holdfast.testing.stores"
)

from holdfast.testing.crashfs import CrashFs, PowerCut  # noqa: E402
from holdfast.testing.faults import Fault, FaultFs  # noqa: E402
from holdfast.testing.stores import StoreContract  # noqa: E402

__all__ = ["CrashFs", "Fault", "FaultFs", "PowerCut", "StoreContract"]
