"""Addresses of versions, such as ``RUN@120``."""

from __future__ import annotations

import os
import re

from holdfast.engine.snapshot.location import path_advice, suggest_similar_path
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.errors import NotFound
from holdfast.format.names import Version, split_address
from holdfast.run.run import Run

ADDRESS_FORMS = (
    "The address of a version is RUN/version_120, RUN@120 (on branch 1: RUN@120.1), or RUN@latest"
)


_BUCKET = re.compile(r"(s3|az|gs)://[^/@]+")


def is_bucket(url: str) -> bool:
    """Return True if ``URL@120`` must be an address: no name of a bucket contains an ``@``."""
    return _BUCKET.fullmatch(url) is not None


def open_version(address: str | os.PathLike[str]) -> Snapshot:
    """Open the snapshot at an address.

    An address is ``RUN@120`` (step 120 on the current lineage), ``RUN@120.1`` (step 120 of branch
    1), ``RUN@latest`` (the newest intact version), or the URL of a snapshot. If a snapshot exists
    at the literal address, that snapshot is opened.

    Raises ``NotFound``, ``NoSnapshot``, or ``FormatError``.
    """
    url, version = split_address(os.fspath(address))
    if version is None or not is_bucket(url):
        try:
            return open_snapshot(address)
        except NotFound as e:
            if version is None:
                raise e.with_advice(ADDRESS_FORMS) from e
    run = Run(url)
    if version == "latest" and (snapshot := run.latest()) is not None:
        return snapshot
    if version == "latest" or not run.listing().has_version():
        raise NotFound(
            f"{run.url} is not a run with versions",
            todo=path_advice(suggest_similar_path(url)),
            key=os.fspath(address),
            store=run.url,
        )
    step, _, branch = version.partition(".")
    return run.open(Version(int(step), int(branch)) if branch else run.find(int(step)))
