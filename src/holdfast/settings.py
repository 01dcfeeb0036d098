"""The only reader of the environment. An unknown HOLDFAST_ variable is an error, not a typo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import HoldfastError


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be set from outside.

    ``threads``: threads that copy, digest, write and read; ``direct``: whether the local store
    may go past the page cache with O_DIRECT; ``silent`` and ``stuck``: seconds after which a rank
    that gives no sign of life, or does not get on, is given up; ``started``: processes that
    torchrun has started, by its own ``WORLD_SIZE``.
    """

    threads: int = 8
    direct: bool = True
    silent: float = 60.0
    stuck: float = 600.0
    launched_world_size: int = 1


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings, from ``HOLDFAST_THREADS``, ``_DIRECT``, ``_SILENT`` and ``_STUCK``.

    Raises ``HoldfastError`` for an unknown ``HOLDFAST_`` variable or a value that does not fit.
    """
    environ = os.environ if environ is None else environ
    known = {f"HOLDFAST_{name}" for name in ("THREADS", "DIRECT", "SILENT", "STUCK")}
    for name in environ:
        if name.startswith("HOLDFAST_") and name not in known:
            raise HoldfastError(
                f"Unknown setting {name} in the environment",
                expected=" or ".join(sorted(known)),
                found=name,
                todo="Correct its name or unset it",
            )
    threads = environ.get("HOLDFAST_THREADS", "8")
    if not threads.isdecimal() or not 1 <= int(threads) <= 256:
        raise HoldfastError(
            "HOLDFAST_THREADS cannot be used", expected="1 to 256", found=repr(threads)
        )
    direct = environ.get("HOLDFAST_DIRECT", "1")
    if direct not in ("0", "1"):
        raise HoldfastError("HOLDFAST_DIRECT cannot be used", expected="0 or 1", found=repr(direct))
    silent, stuck = (
        _read_seconds(environ, name, standard)
        for name, standard in (("HOLDFAST_SILENT", "60"), ("HOLDFAST_STUCK", "600"))
    )
    world = environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in environ else "1"
    started = int(world) if world.isdecimal() else 1
    return Settings(int(threads), direct == "1", silent, stuck, started)


def _read_seconds(environ: Mapping[str, str], name: str, default: str) -> float:
    text = environ.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise HoldfastError(f"{name} cannot be used", expected="seconds above 0", found=repr(text))
    return seconds
