"""Notices that this process will be stopped, where they come from, and how the process exits.

Terms: a *notice* is a message that the process will be stopped. Its *deadline* is the time of that
stop. A *source* reports notices.
May import: the root modules, ``format``, ``preemption``, ``ranks``, and ``state``.

Each public name is imported on first use, as in ``limpet``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limpet.preemption.guard import PreemptionGuard
    from limpet.preemption.notice import Notice, NoticeSource
    from limpet.preemption.notices.aws import AwsNotice
    from limpet.preemption.notices.azure import AzureNotice
    from limpet.preemption.notices.call import CallNotice
    from limpet.preemption.notices.file import FileNotice
    from limpet.preemption.notices.gcp import GcpNotice
    from limpet.preemption.notices.kubernetes import KubernetesNotice
    from limpet.preemption.notices.slurm import SlurmNotice
    from limpet.preemption.policy import Preemption
    from limpet.preemption.signals import SignalNotice, protect_worker

__all__ = [
    "AwsNotice",
    "AzureNotice",
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
    "protect_worker",
]

_LAZY_NAMES = {
    "AwsNotice": "notices.aws",
    "AzureNotice": "notices.azure",
    "CallNotice": "notices.call",
    "FileNotice": "notices.file",
    "GcpNotice": "notices.gcp",
    "KubernetesNotice": "notices.kubernetes",
    "Notice": "notice",
    "NoticeSource": "notice",
    "Preemption": "policy",
    "PreemptionGuard": "guard",
    "SignalNotice": "signals",
    "SlurmNotice": "notices.slurm",
    "protect_worker": "signals",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'limpet.preemption' has no attribute {name!r}")
    value = getattr(import_module(f"limpet.preemption.{_LAZY_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
