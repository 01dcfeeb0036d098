"""The public names of preemption: notices that this process will be stopped, and what follows.

The code is in ``notices`` (sources of notices, exit codes) and ``training`` (how a training leaves
after a notice). Each name is imported on first use, as in ``limpet``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limpet.notices.aws import AwsNotice
    from limpet.notices.azure import AzureNotice
    from limpet.notices.call import CallNotice
    from limpet.notices.exit_status import Status, announce_worker, leave_code
    from limpet.notices.file import FileNotice
    from limpet.notices.gcp import GcpNotice
    from limpet.notices.kubernetes import KubernetesNotice
    from limpet.notices.notice import BoundedSource, Notice, NoticeSource
    from limpet.notices.platform import detect_sources
    from limpet.notices.signals import SignalNotice, protect_worker
    from limpet.notices.slurm import SlurmNotice
    from limpet.training.guard import PreemptionGuard
    from limpet.training.preemption import Preemption

__all__ = [
    "AwsNotice",
    "AzureNotice",
    "BoundedSource",
    "CallNotice",
    "FileNotice",
    "GcpNotice",
    "KubernetesNotice",
    "Notice",
    "NoticeSource",
    "Preemption",
    "PreemptionGuard",
    "SignalNotice",
    "SlurmNotice",
    "Status",
    "announce_worker",
    "detect_sources",
    "leave_code",
    "protect_worker",
]

_LAZY_NAMES = {
    "AwsNotice": "notices.aws",
    "AzureNotice": "notices.azure",
    "BoundedSource": "notices.notice",
    "CallNotice": "notices.call",
    "FileNotice": "notices.file",
    "GcpNotice": "notices.gcp",
    "KubernetesNotice": "notices.kubernetes",
    "Notice": "notices.notice",
    "NoticeSource": "notices.notice",
    "Preemption": "training.preemption",
    "PreemptionGuard": "training.guard",
    "SignalNotice": "notices.signals",
    "SlurmNotice": "notices.slurm",
    "Status": "notices.exit_status",
    "announce_worker": "notices.exit_status",
    "detect_sources": "notices.platform",
    "leave_code": "notices.exit_status",
    "protect_worker": "notices.signals",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'limpet.preemption' has no attribute {name!r}")
    value = getattr(import_module(f"limpet.{_LAZY_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
