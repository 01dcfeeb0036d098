"""The public names of preemption: notices that this process will be stopped, and what follows.

The code is in ``notices`` (sources of notices, exit codes) and ``training`` (how a training leaves
after a notice). Each name is imported on first use, as in ``limpet``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limpet.lazy_names import lazy_names

if TYPE_CHECKING:
    from limpet.notices.aws import AwsNotice as AwsNotice
    from limpet.notices.azure import AzureNotice as AzureNotice
    from limpet.notices.call import CallNotice as CallNotice
    from limpet.notices.exit_status import (
        Status as Status,
        announce_worker as announce_worker,
        leave_code as leave_code,
    )
    from limpet.notices.file import FileNotice as FileNotice
    from limpet.notices.gcp import GcpNotice as GcpNotice
    from limpet.notices.kubernetes import KubernetesNotice as KubernetesNotice
    from limpet.notices.notice import (
        BoundedSource as BoundedSource,
        Notice as Notice,
        NoticeSource as NoticeSource,
    )
    from limpet.notices.platform import detect_sources as detect_sources
    from limpet.notices.signals import (
        SignalNotice as SignalNotice,
        protect_worker as protect_worker,
    )
    from limpet.notices.slurm import SlurmNotice as SlurmNotice
    from limpet.training.guard import PreemptionGuard as PreemptionGuard
    from limpet.training.preemption_plan import Preemption as Preemption

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "notices.aws": "AwsNotice",
        "notices.azure": "AzureNotice",
        "notices.call": "CallNotice",
        "notices.exit_status": "Status announce_worker leave_code",
        "notices.file": "FileNotice",
        "notices.gcp": "GcpNotice",
        "notices.kubernetes": "KubernetesNotice",
        "notices.notice": "BoundedSource Notice NoticeSource",
        "notices.platform": "detect_sources",
        "notices.signals": "SignalNotice protect_worker",
        "notices.slurm": "SlurmNotice",
        "training.guard": "PreemptionGuard",
        "training.preemption_plan": "Preemption",
    },
)
