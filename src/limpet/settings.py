"""The settings in the environment. No other module reads settings from there.

An unknown ``LIMPET_`` variable is an error, so that a typo is not ignored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from limpet.errors import LimpetError


@dataclass(frozen=True, slots=True)
class Settings:
    """The values that the environment can set. ``direct``: O_DIRECT is allowed. ``silent``,
    ``stuck``: seconds without heartbeat, or without progress, after which a rank has failed."""

    threads: int
    direct: bool
    silent: float
    stuck: float
    quiet: bool
    launched_world_size: int


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the variables ``LIMPET_*``. Raises ``LimpetError`` for an unknown one or an invalid
    value. ``status_folder``, ``run_grace``, and ``evaluation_secret`` read the others."""
    for name in environ:
        if name.startswith("LIMPET_") and name not in _KNOWN:
            raise LimpetError(
                f"Unknown environment variable {name}",
                expected=" or ".join(sorted(_KNOWN)),
                found=name,
                todo="Correct or unset it",
            )
    threads = environ.get("LIMPET_THREADS", "8")
    if not threads.isdecimal() or not 1 <= int(threads) <= 256:
        raise LimpetError(
            "Invalid value for LIMPET_THREADS", expected="1 to 256", found=repr(threads)
        )
    if environ.get(_GRACE):
        _read_seconds(environ, _GRACE, "")
    world = environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in environ else "1"
    return Settings(
        threads=int(threads),
        direct=_read_switch(environ, "LIMPET_DIRECT", "1"),
        silent=_read_seconds(environ, "LIMPET_SILENT", "60"),
        stuck=_read_seconds(environ, "LIMPET_STUCK", "600"),
        quiet=_read_switch(environ, "LIMPET_QUIET", "0"),
        launched_world_size=int(world) if world.isdecimal() else 1,
    )


_STATUS = "LIMPET_STATUS"
_GRACE = "LIMPET_GRACE"
_SECRET = "LIMPET_SECRET"
_KNOWN = {
    *("LIMPET_THREADS", "LIMPET_DIRECT", "LIMPET_SILENT", "LIMPET_STUCK", "LIMPET_QUIET"),
    *(_STATUS, _GRACE, _SECRET),
}

MEMORY_SUFFIX = ".memory"
"""The end of the names of files in ``status_folder`` about states in memory (``tiers/flush``)."""


def status_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder for the status of this process, or None outside ``limpet run``."""
    return environ.get(_STATUS) or None


def run_grace(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds from a signal to the kill by the ``limpet run`` above, or None."""
    return _read_seconds(environ, _GRACE, "") if environ.get(_GRACE) else None


@dataclass(frozen=True, slots=True)
class LaunchedWorker:
    """What torchrun tells a worker. The job id is the same on all hosts and in all restarts;
    ``restart_count`` leaves out those after a change of the hosts."""

    job_id: str
    local_world_size: int
    restart_count: int


LAUNCHED_WORKER_VARIABLE = "TORCHELASTIC_RUN_ID"
"""A process has this variable if torchrun started it, directly or not."""


def launched_worker(environ: Mapping[str, str] = os.environ) -> LaunchedWorker | None:
    """Return what torchrun told this worker, or None if torchrun did not start this process."""
    job_id = environ.get(LAUNCHED_WORKER_VARIABLE)
    if job_id is None:
        return None
    size = environ.get("LOCAL_WORLD_SIZE", "1")
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedWorker(
        job_id=job_id,
        local_world_size=int(size) if size.isdecimal() else 1,
        restart_count=int(restarts) if restarts.isdecimal() else 0,
    )


def command_environment(
    folder: str, grace: float, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of the command of ``limpet run``; ``grace`` is in seconds. ``PET_``:
    torchrun's own defaults of two options, which its command line overrides."""
    defaults = {
        "PET_SHUTDOWN_TIMEOUT": str(math.ceil(grace)),
        # by default, SIGUSR1 and SIGUSR2 end torchrun and leave its workers behind
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
    }
    return {**defaults, **environ, _STATUS: folder, _GRACE: f"{grace:g}"}


def platform_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of Slurm, Kubernetes, torchrun, and clouds that name the platform."""
    beginnings = ("SLURM_", "KUBERNETES_", "AWS_EC2_METADATA_", "GCE_METADATA_")
    names = ("HOSTNAME", "POD_NAME", "POD_NAMESPACE", "RANK", "LOCAL_RANK")
    return dict(find_variables((*beginnings, *names), os.environ if environ is None else environ))


BOTO3_VARIABLES = ("AWS_",)
OBSTORE_VARIABLES = ("AZURE_", "AZURITE_", "GOOGLE_")
"""How the variables begin that these libraries read: a client is made for their values."""


def find_variables(
    beginnings: tuple[str, ...], environ: Mapping[str, str] = os.environ
) -> frozenset[tuple[str, str]]:
    """Return the environment variables whose names begin so, with their values."""
    found: set[tuple[str, str]] = set()
    for name in list(environ):
        # another thread may remove a variable meanwhile
        if name.startswith(beginnings) and (value := environ.get(name)) is not None:
            found.add((name, value))
    return frozenset(found)


def _read_switch(environ: Mapping[str, str], name: str, default: str) -> bool:
    text = environ.get(name, default)
    if text not in ("0", "1"):
        raise LimpetError(f"Invalid value for {name}", expected="0 or 1", found=repr(text))
    return text == "1"


def _read_seconds(environ: Mapping[str, str], name: str, default: str) -> float:
    text = environ.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise LimpetError(
            f"Invalid value for {name}",
            expected="a number of seconds greater than 0 and less than 1e9",
            found=repr(text),
        )
    return seconds


def evaluation_secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the secret of the evaluator and of the workers that connect to it, or None."""
    return environ.get(_SECRET) or None


def ray_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the Ray cluster that the environment names, or None."""
    return environ.get("RAY_ADDRESS") or None
