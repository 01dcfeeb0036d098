"""The global random generators: their states, and code that leaves them unchanged.

Those of Python, NumPy, PyTorch, and each device of its accelerator belong to the process. They are
*isolated* in ``isolated_rng``, and while a save or a load calls code of the user, whose draws would
change what the training draws next. Loading the ``RNG`` last would not be enough: an object may
contain one. This module imports neither NumPy nor torch, and initializes no device.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, Self, TypeVar

from limpet.errors import LimpetError
from limpet.lazy_torch import torch_or_none

States = dict[str, Any]
"""The states of generators by name: ``python``, ``numpy``, ``torch``, and devices as ``cuda:0``."""

Function = TypeVar("Function", bound=Callable[..., Any])


def isolated_rng() -> Isolation:
    """Return a context manager that restores all random generators on exit, also after an error.

    Use it for everything that a resumed training does not repeat, above all for an evaluation::

        with limpet.isolated_rng():
            validation_loss = evaluate(model)

    The generators are those of Python and NumPy (the legacy one), of PyTorch, and of all devices of
    its accelerator. A save inside the block records ``RNG`` as it was when the outermost block
    began, which is where training continues. Blocks can be nested. A function can be decorated.

    Inside the block, the generators continue from their current states. To evaluate with the same
    random numbers every time, seed them there. A library that is first imported inside the block
    has a new random seed after it.

    The generators belong to the process: what other threads draw during the block is undone too.
    Therefore, use a block only in the thread that trains. ``Checkpointer.resume``, and more than
    one ``Checkpointer.step`` in the same block, raise ``LimpetError``.
    """
    return Isolation("block")


@dataclass(slots=True, eq=False)
class _Open:
    """One open isolation of a thread. ``restores``: its end restores ``states``; not if another
    thread draws the random numbers of the training."""

    states: States
    kind: str
    restores: bool
    is_rng_loaded: bool = False


class _ThreadIsolations(threading.local):
    """The open isolations of this thread, outermost first. Ctrl-C at the beginning of ``__exit__``
    can leave one open until the call of a ``Checkpointer`` or the isolation around it ends."""

    def __init__(self) -> None:
        self.open: list[_Open] = []


isolations = _ThreadIsolations()


def end_interrupted(depth: int) -> None:
    """End what an exception of a signal handler has left open in a call, which has begun within
    ``depth`` isolations. Otherwise, every later save would have the generators of that moment."""
    _end_at(isolations.open, depth)


class Isolation:
    """Restores the generators at the end of a block, any number of times, also nested.

    ``kind`` is "block" for a block of the user, "call" for user code in a save, and "load" for user
    code that may load the generators, which stay as loaded. A call or load outside the main thread
    restores only if an ``RNG`` takes part: another thread may be training, and its numbers would
    repeat.
    """

    def __init__(self, kind: Literal["block", "call", "load"]) -> None:
        self._kind = kind
        self._open: list[_Open] = []

    def __enter__(self) -> None:
        _begin(self._kind, [] if self._kind == "block" else self._open)

    def __exit__(self, *error: object) -> None:
        _end(self._kind, self._open)

    def __call__(self, function: Function) -> Function:
        """Return ``function`` with every call in a block of its own."""
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise LimpetError(
                f"isolated_rng() cannot decorate {getattr(function, '__qualname__', function)}",
                expected="a function that has drawn its random numbers when it returns",
                found="a generator function or coroutine function",
                todo="Use `with limpet.isolated_rng():` around the loop or call that draws",
            )

        @wraps(function)
        def isolated(*args: Any, **kwargs: Any) -> Any:
            with Isolation(self._kind):  # another thread may call the function, too
                return function(*args, **kwargs)

        return isolated  # type: ignore[return-value]


class DeferredIsolation:
    """An isolation of a call, from the first ``begin`` on: without user code, it costs nothing."""

    def __init__(self) -> None:
        self._open: list[_Open] = []

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Isolate the generators until the end of the block."""
        if not self._open:
            _begin("call", self._open)

    def __exit__(self, *error: object) -> None:
        if self._open:
            _end("call", self._open)


def _begin(kind: Literal["block", "call", "load"], own: list[_Open]) -> None:
    """Begin an isolation, which is appended to ``own``."""
    is_main = threading.current_thread() is threading.main_thread()
    begun, found = _Open(capture_states(), kind, is_main or kind == "block"), isolations.open
    try:
        own.append(begun)
        found.append(begun)
    except BaseException:  # of a signal handler: ``__exit__`` does not follow
        own.remove(begun)
        if begun in found:
            found.remove(begun)
        raise


def _end(kind: str, own: list[_Open]) -> None:
    """End the innermost isolation of ``own``, and those in it that are still open. Coroutines may
    leave blocks in another order than they entered them: each end is that of the innermost one."""
    found = isolations.open
    blocks = [at for at, isolation in enumerate(found) if isolation.kind == "block"]
    if kind != "block":
        at = found.index(own.pop())
    elif blocks:
        at = blocks[-1]
    else:
        raise LimpetError(
            "A block of isolated_rng() ended in another thread than it began in",
            todo="Do not pass a generator that is inside such a block to another thread",
        )
    _end_at(found, at)


def _end_at(found: list[_Open], at: int) -> None:
    ended = found[at]
    del found[at:]
    if ended.restores:
        _add_new_generators(ended.states)
        restore_states(ended.states)


def open_block() -> object | None:
    """Return the outermost block of ``isolated_rng`` that this thread is in, or None."""
    found = isolations.open
    return found[0] if found and found[0].kind == "block" else None


# -- the states that a training saves and loads --------------------------------------------------


def training_states() -> States:
    """Return the states from which training continues: the current ones, or those at the beginning
    of the outermost isolation."""
    frames = isolations.open
    if not frames:
        return capture_states()
    for frame in frames:
        frame.restores = True
    _add_new_generators(frames[0].states)
    return frames[0].states


def load_training_states(states: States) -> None:
    """Set generators to the states that an ``RNG`` loads, now and at the end of the load, so that
    what other objects draw in the same load has no effect."""
    restore_states(states)
    for frame in _loads():
        frame.states.update(states)
        frame.restores = frame.is_rng_loaded = True


def keep_restored(loaded: Any) -> None:
    """Keep the generators that an object other than ``RNG`` has restored: those whose new state is
    in the ``loaded`` state dict. An ``RNG`` in the same load takes precedence."""
    frames = list(_loads())
    found = list(_find_states(loaded, 0)) if frames and not frames[0].is_rng_loaded else []
    if found:
        before = frames[0].states
        for name, state in capture_states().items():
            changed = not _is_equal(before.get(name), state)
            if changed and any(_is_equal(candidate, state) for candidate in found):
                for frame in frames:
                    frame.states[name] = state
                    frame.restores = True


def _loads() -> Iterator[_Open]:
    """Yield the isolations of the load in progress, the innermost first."""
    for frame in reversed(isolations.open):
        if frame.kind != "load":
            return
        yield frame


def _find_states(value: Any, depth: int) -> Iterator[Any]:
    """Yield the members of a loaded state that look like the state of a generator."""
    if isinstance(value, dict):
        if "bit_generator" in value:
            yield value
        members = list(value.values())
    elif isinstance(value, list | tuple):
        if len(value) == 5 and value[0] == "MT19937":  # NumPy's legacy form
            names = ("bit_generator", "state", "has_gauss", "gauss")
            yield dict(zip(names, (value[0], dict(zip(("key", "pos"), value[1:3])), *value[3:])))
        elif len(value) == 3 and isinstance(value[1], list | tuple):
            yield value
        members = list(value)
    else:
        if str(getattr(value, "dtype", "")) == "torch.uint8":
            yield value
        return
    if depth < 10 and len(members) < 100:
        for member in members:
            yield from _find_states(member, depth + 1)


def _is_equal(a: Any, b: Any) -> bool:
    """Return True if two states of generators are equal."""
    if isinstance(b, dict):
        return isinstance(a, dict) and all(_is_equal(a.get(name), b[name]) for name in b)
    if isinstance(b, tuple):
        return isinstance(a, list | tuple) and len(a) == len(b) and all(map(_is_equal, a, b))
    if hasattr(b, "shape"):  # a tensor or an array
        return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


# -- the generators ------------------------------------------------------------------------------


def capture_states() -> States:
    """Return the current states of all generators that the program uses."""
    states: States = {"python": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), torch_or_none()
    if numpy_random is not None:
        states["numpy"] = numpy_random.get_state(legacy=False)
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        module, devices = _devices_in_use(torch)
        for name, args in devices.items():
            states[name] = module.get_rng_state(*args)
    return states


def restore_states(states: States) -> None:
    """Set generators to the given states. Devices that do not exist are left out."""
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch  # the program may import it only after the resume

        torch.set_rng_state(states["torch"])
        if states.keys() - {"python", "numpy", "torch"}:
            module, devices = _devices(torch)
            for name in devices.keys() & states.keys():
                module.set_rng_state(states[name], *devices[name])


def _devices_in_use(torch: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return the same as ``_devices``, but no devices if the program has not used them yet."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    # ask is_initialized first: is_available may break a later fork
    is_in_use = module is not None and getattr(module, "is_initialized", lambda: True)()
    return _devices(torch) if is_in_use else (module, {})


def _devices(torch: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return the module of PyTorch's accelerator, and by name (``cuda:0``) the arguments that
    select each device. A single device needs none (MPS takes none)."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    if not hasattr(module, "get_rng_state") or not torch.accelerator.is_available():
        return module, {}
    count = torch.accelerator.device_count()
    return module, {f"{device.type}:{i}": (i,) if count > 1 else () for i in range(count)}


def _add_new_generators(states: States) -> None:
    """Add the generators that came into use after ``states`` was captured: a device as at its first
    use, unless seeded since; an imported library with a new random seed."""
    numpy_random, torch = sys.modules.get("numpy.random"), torch_or_none()
    if numpy_random is not None and "numpy" not in states:
        states["numpy"] = numpy_random.RandomState().get_state(legacy=False)
    if torch is None:
        return
    if "torch" not in states:
        generator = torch.Generator()
        generator.seed()
        states["torch"] = generator.get_state()
    module, devices = _devices_in_use(torch)
    for name, default in zip(devices, getattr(module, "default_generators", ())):
        if name not in states:
            current, seed = default.get_state(), default.initial_seed()
            if seed == torch.initial_seed():  # of torch.manual_seed, perhaps since the capture
                seed = torch.Generator().set_state(states["torch"]).initial_seed()
            states[name] = default.manual_seed(seed).get_state()
            default.set_state(current)
