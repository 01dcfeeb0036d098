"""A Ray cluster, for engines with actors. Only this module imports ray, once one is used."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from limpet.arguments import require
from limpet.errors import LimpetError
from limpet.settings import ray_address
from limpet.text import advise_install, to_repr

_OPTIONS = (
    "num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector",
    "scheduling_strategy", "runtime_env",
)  # fmt: skip
"""What a user may say of an actor: what it needs, and where it runs. Engines decide the rest."""

_MAX_CAUSE = 500
"""The number of characters of an error of Ray, which can be long, in a message."""

_CONNECT_SECONDS = 10.0


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``LimpetError`` unless these are options of actors that a user may give as ``name``."""
    require(name, isinstance(options, Mapping), "a dict of options of Ray", options)
    unknown = sorted(map(str, options.keys() - set(_OPTIONS)))
    require(name, not unknown, f"some of {', '.join(_OPTIONS)}", unknown)


def actor_class(ray: Any, kind: type, options: Mapping[str, Any], **own: Any) -> Any:
    """Return a class of actors, which Ray does not restart: the engines start another one. Raises
    ``LimpetError`` for options that Ray refuses."""
    own |= {"max_restarts": 0, "max_task_retries": 0}
    try:
        return ray.remote(**{"num_cpus": 1, **options, **own})(kind)
    except (TypeError, ValueError) as e:
        what = f"Ray refuses ray={to_repr(dict(options))[:200]}"
        raise LimpetError(what, found=describe(e)) from e


def own_path() -> list[str]:
    """Return where this process finds modules, for ``add_path`` in an actor."""
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]


def add_path(path: list[str]) -> None:
    # at the end: what Ray has prepared, such as a runtime_env, has priority
    sys.path.extend(entry for entry in path if entry not in sys.path)


def describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_CAUSE]


def connect(user: str) -> Any:
    """Import ray, connect to a cluster that exists unless the program has, and return ray. Raises
    ``LimpetError`` without Ray or a cluster. ``user``: what needs it."""
    try:
        import ray
    except ImportError as e:
        raise LimpetError(f"{user} needs the package ray", todo=advise_install("ray")) from e
    if not ray.is_initialized():
        _require_listener(ray_address())
        try:
            with _same_sigterm_handler():
                ray.init(address="auto")
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            raise LimpetError(
                f"There is no Ray cluster for {user}",
                found=describe(e),
                todo="Start one (ray start --head), set RAY_ADDRESS, or call ray.init() before",
            ) from e
    return ray


def _require_listener(address: str | None) -> None:
    """Raise ``LimpetError`` unless something listens at an address: Ray would try for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not (colon and port.isdigit()):  # such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise LimpetError(
            "There is no Ray cluster",
            expected=f"one that listens at {address}, the RAY_ADDRESS",
            found=describe(e),
            todo="Start it (ray start --head), correct RAY_ADDRESS, or unset it",
        ) from e


@contextmanager
def _same_sigterm_handler() -> Iterator[None]:
    """Undo that ``ray.init`` replaces the handler of SIGTERM: a training may need it to save."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray does not replace it there
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # it was not installed by Python
            signal.signal(signal.SIGTERM, before)
