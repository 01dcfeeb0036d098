"""How many parts a save sends at once, and how long they are: what the uploads before have shown.

All of a part is in memory while it is sent, so with the same memory, long parts mean few
connections. One connection to S3 transfers 85 to 90 MB/s ("Performance Design Patterns for Amazon
S3", AWS), so more of them are faster. Where the processor or the network as a whole is the limit,
they are not, and each request takes 1 to 2 ms of the processor.
"""

from __future__ import annotations

from threading import Lock

from limpet.types import MIB

STEPS = ((7, 8 * MIB), (3, 16 * MIB), (2, 28 * MIB))
"""The number of connections, and the length of the parts, in bytes."""

IN_FLIGHT = 56 * MIB
"""The bytes of parts that a save keeps in memory at once, besides what is staged."""

MEASURED = 2 * IN_FLIGHT
"""The least length of an upload whose bandwidth counts, in bytes."""

ACCEPTED = 0.75
"""Long parts are used if they reach this share of the bandwidth of shorter ones."""

HOLD = 16
"""The number of uploads after which long parts are tried again."""


class Pace:
    """The present step, which ``note`` changes after an upload.

    It goes on to longer parts as long as the bandwidth does not fall with the number of the
    connections, and back if it does. (Hill climbing, as in J. Hellerstein et al., "Optimizing
    Concurrency Levels in the .NET ThreadPool", 2009.)
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._step = self._hold = 0
        self._bandwidths: dict[int, float] = {}

    @property
    def connections(self) -> int:
        return STEPS[self._step][0]

    @property
    def part_size(self) -> int:
        return STEPS[self._step][1]

    def note(self, part_size: int, length: int, seconds: float) -> None:
        """Note how long an upload took. One with other parts than the present ones does not
        count."""
        with self._lock:
            if part_size != self.part_size or length < MEASURED or seconds <= 0:
                return
            found = self._bandwidths[self._step] = length / seconds
            if found < ACCEPTED * self._bandwidths.get(self._step - 1, 0):
                self._step, self._hold = self._step - 1, HOLD
            elif self._hold:
                self._hold -= 1
            elif self._step + 1 < len(STEPS):
                self._step += 1
