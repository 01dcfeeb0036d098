"""One event, and what followed from it."""

from dataclasses import dataclass, field

from tests.chaos.schedule import Event

INTERRUPTED = "killed again"
"""Instead of a tier: the next event came before the state was back. Its row has the lost steps."""


@dataclass
class Row:
    """A row of the table: an event and its consequences. Times are in seconds."""

    at: float
    event: Event
    target: str
    last_step: int
    restarted: bool = True
    resumed_step: int = 0
    flushed: str = ""
    tier: str = ""
    detection: float = 0.0
    start: float = 0.0
    rendezvous: float = 0.0
    restore: float = 0.0
    codes: list[int | None] = field(default_factory=list)

    @property
    def lost(self):
        """The steps that the training makes again. 0: it left after more than ``last_step``."""
        is_counted = self.restarted and self.tier != INTERRUPTED
        return max(0, self.last_step - self.resumed_step) if is_counted else 0
