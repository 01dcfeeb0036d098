"""What happens to the training, and when: a schedule that a seed determines."""

import random
import signal
from dataclasses import dataclass
from enum import StrEnum

from limpet.notices.exit_status import FAILED, SAVED, UNSAVED


class Kind(StrEnum):
    """The kinds of events. A rank, a host, and a moment are drawn for each."""

    SIGTERM = "SIGTERM to a rank"
    SIGKILL = "SIGKILL to a rank"
    EARLY_KILL = "SIGKILL during a restore"
    PAUSE = "SIGSTOP, SIGCONT"
    HANG = "SIGSTOP, SIGKILL"
    HANG_AND_NOTICE = "SIGSTOP, then a notice"
    LOSE_HOST = "loss of a host"
    NOTICE_AWS = "notice of AWS"
    NOTICE_GCP = "notice of Google Cloud"
    NOTICE_AZURE = "notice of Azure"
    NOTICE_POD = "deletion of the pod"
    REBOOT = "reboot of all hosts"
    FLIP_MEMORY = "bit flip in memory"
    FLIP_LOCAL = "bit flip on a local disk"
    FLIP_DURABLE = "bit flip on disk"
    FULL_MEMORY = "full memory"
    FULL_DISK = "full disk"
    EVALUATOR = "end of an evaluator"


NEEDS_ROOT = {Kind.FULL_MEMORY, Kind.FULL_DISK}
"""Only root can mount a file system and fill it."""

NOTICES = (Kind.NOTICE_AWS, Kind.NOTICE_GCP, Kind.NOTICE_AZURE, Kind.NOTICE_POD)

LEAVES = {SAVED}
DIES = {FAILED, SAVED, UNSAVED, -signal.SIGTERM}
"""The codes of the ranks that survive a failure of another one. The supervisor then asks them to
stop, as torchrun does, so the failure and the request are both a reason to leave. A rank that has
already left its ``with`` block because of the failure does not handle the signal anymore."""

EXPECTED_CODES: dict[Kind, set[int]] = {
    Kind.SIGTERM: LEAVES,
    **dict.fromkeys(NOTICES, LEAVES),
    Kind.HANG_AND_NOTICE: {UNSAVED, SAVED},
    Kind.FULL_MEMORY: {FAILED, UNSAVED},
    Kind.FULL_DISK: {FAILED, UNSAVED},
}
"""The exit codes of the ranks that no SIGKILL has hit. ``DIES`` for all other kinds."""


@dataclass(frozen=True)
class Event:
    """One event. ``steps``: how many steps after the resume it happens. ``draw``: what it hits.

    ``flush``: whether the newest state in memory is saved to the run afterward, as ``limpet run``
    does. ``size``: the number of ranks of the next start. ``has_launcher_store``: whether the
    launcher then hosts the job's store, as torchrun does, or rank 0.
    """

    kind: Kind
    steps: int
    draw: int
    flush: bool
    size: int
    has_launcher_store: bool


SIZES = (4, 4, 3, 4, 2, 3)
"""The numbers of ranks, one after the other, if they change."""


def make_schedule(seed, *, changes_size, is_root):
    """Yield events without end. Each kind occurs before any of them occurs again."""
    rng = random.Random(f"{seed} {changes_size}")
    kinds = [kind for kind in Kind if is_root or kind not in NEEDS_ROOT]
    number = 0
    while True:
        rng.shuffle(kinds)
        for kind in kinds:
            number += 1
            size = SIZES[number % len(SIZES)] if changes_size else SIZES[0]
            draw, flush = rng.randrange(1 << 30), rng.random() < 0.3
            is_apart = rng.random() < 0.5
            yield Event(kind, rng.randrange(3, 70), draw, flush, size, is_apart)
