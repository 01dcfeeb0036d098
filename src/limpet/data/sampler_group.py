"""The state that the samplers of one training state share, for loops over several loaders."""

from __future__ import annotations

from limpet.generators import States, capture_states, restore_states


class SamplerGroup:
    """The passes of a group of samplers, and the random generators before their first pass.

    Each loader draws from the global generators when its iterator is created. A run that was never
    interrupted creates no iterator in the middle of an epoch. The group therefore saves the state
    of the generators before the first draw after a resume, and restores it when the first batch is
    requested.
    """

    def __init__(self) -> None:
        self.events = 0
        """The number of passes begun and of epochs ended."""

        self._at_beginning: set[object] = set()
        self._rng_state: States | None = None

    def record_load(self, sampler: object, *, at_beginning: bool) -> None:
        """Record that a resume set the position of a sampler."""
        (self._at_beginning.add if at_beginning else self._at_beginning.discard)(sampler)
        self._rng_state = None

    def save_rng_state(self) -> None:
        """Save the state of the generators before a loader draws for the first pass after a resume.

        Nothing is saved while a sampler has yet to begin a pass from its beginning. The version was
        then saved between two passes, and the uninterrupted run also created an iterator.
        """
        if self._rng_state is None and not self._at_beginning:
            self._rng_state = capture_states()

    def begin_pass(self, sampler: object, resumed: bool) -> None:
        """Record the beginning of a pass. ``resumed``: it is the first pass after a resume."""
        self.events += 1
        self._at_beginning.discard(sampler)
        rng_state, self._rng_state = self._rng_state, None
        if resumed and rng_state is not None:
            restore_states(rng_state)
