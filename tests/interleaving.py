"""Two actors on one store, each in its own thread, of which exactly one runs at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from limpet.storage.store import Store
from tests.unreliable_stores import HookedStore

TIMEOUT = 60.0


@dataclass(slots=True)
class Actor:
    """Something that an action does to a store, and how it ended.

    ``failure`` is the error that it raised. ``calls`` counts its calls of the store.
    """

    action: Callable[[Store], object]
    failure: BaseException | None = None
    result: object = None
    calls: int = 0
    _limit: int = 0
    _has_ended: bool = False
    _lock: Lock = field(default_factory=Lock)
    _paused: Event = field(default_factory=Event)
    _resumed: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def run(self, inner, calls):
        """Let the actor make so many more calls of the store (None: all); return True at its end.

        It is then right before its next call.
        """
        self._limit = 1 << 30 if calls is None else self.calls + calls
        self._paused.clear()
        self._resumed.set()
        if self._thread is None:
            self._thread = Thread(target=self._act, args=(inner,))
            self._thread.start()
        assert self._paused.wait(TIMEOUT)
        if self._has_ended:
            self._thread.join(TIMEOUT)
        return self._has_ended

    def _act(self, inner):
        store = HookedStore(inner)
        store.before = self._before
        try:
            self.result = self.action(store)
        except BaseException as e:
            self.failure = e
        finally:
            self._has_ended = True
            self._paused.set()

    def _before(self, method, key):
        while True:
            with self._lock:
                if self.calls < self._limit:
                    self.calls += 1
                    return
                self._resumed.clear()
                self._paused.set()
            assert self._resumed.wait(TIMEOUT)


def run_interleaved(inner, first, second, calls):
    """Run the first actor for ``calls[0]`` calls of the store, then the second one for ``calls[1]``
    calls, then the first to its end, then the second."""
    ended = [actor.run(inner, n) for actor, n in zip((first, second), calls, strict=True)]
    for actor, has_ended in zip((first, second), ended, strict=True):
        if not has_ended:
            actor.run(inner, None)


def count_calls(inner, action):
    """Return the number of calls of the store that an action makes."""
    actor = Actor(action)
    actor.run(inner, None)
    assert actor.failure is None
    return actor.calls
