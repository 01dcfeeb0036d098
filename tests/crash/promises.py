"""Check the eight promises of docs/format.md, as far as the files of a run can prove them."""

import os
import time
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import xxhash

import limpet
from limpet.errors import NotFound
from limpet.format import names
from limpet.format.names import Version
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.ranks.group import current_group
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.run.sweep import MIN_GRACE
from limpet.snapshot import pins
from tests.trainings import initial_state, state_after, states_equal, train_step

State = dict[str, Any]
MAX_FILE = 1 << 24


def check_promises(store, committed=(), *, expected=state_after, assume_dead_pins=True):
    """Check all promises on the files that a stopped training (of ``trainings.py``) left.

    Return the committed steps of the run's lineage. The check also resumes the run, saves one more
    step, and sweeps.

    Args:
        store: The store of the run.
        committed: Steps whose save had returned and that retention cannot have deleted.
        expected: Returns the state that the version of a step must contain.
        assume_dead_pins: Treat every pin as held by a dead process, as after a crash. If False,
            ask the operating system.
    """
    run = Run(store)
    versions_before = verify_versions(run, expected)
    lineage = run.line()
    steps = [version.step for version in lineage]
    assert set(committed) <= set(steps), (committed, steps)
    check_visible_versions(run, set(versions_before), lineage)
    newest = steps[-1] if steps else 0
    check_resume(store, newest, expected)
    versions = verify_versions(run, expected)
    assert {v: versions[v] for v in versions_before} == versions_before, "a version was modified"
    assert set(versions) - set(versions_before) == {Version(newest + 1, run.branch())}
    with all_pins_dead() if assume_dead_pins else pins_unchanged():
        # sweep spares small files that are younger than MIN_GRACE
        swept = run.sweep(grace=0, now=time.time() + MIN_GRACE + 1)
    assert swept.kept == []
    check_no_orphans(run)
    assert verify_versions(run, expected) == versions
    return steps


@contextmanager
def one_thread():
    """Set LIMPET_THREADS to 1, because thousands of states are checked.

    A change of the environment is not thread-safe: it can fail, in another thread, the start of a
    process. Tests that check in several threads set the variable before they start them.
    """
    if os.environ.get("LIMPET_THREADS") == "1":
        yield
    else:
        with mock.patch.dict(os.environ, {"LIMPET_THREADS": "1"}):
            yield


VERIFIED = set()
"""The versions that were verified: step, expected state, and the bytes of all files. Thousands of
states contain the same ones."""


@one_thread()
def verify_versions(run, expected):
    """Check promises 1, 2, 3, and 7, and return the digests of the manifests.

    Every manifest is valid, and every byte that it refers to is intact.
    """
    digests = {}
    for version in run.listing().versions:
        snapshot = run.open(version)
        reader = reader_of(snapshot)
        reader.check_files()
        parent = reader.manifest.parent
        if parent is not None:
            assert parent.version in map(str, digests) or not has_manifest(run, parent.version)
        digests[version] = reader.digest
        keys = map(reader.location.file_key, shard_files(reader))
        files = xxhash.xxh3_128_digest(b"".join(run.store.get(key, MAX_FILE) for key in keys))
        content = (version.step, expected, reader.digest, files)
        if content not in VERIFIED:
            verify_version(snapshot, expected(version.step))
            VERIFIED.add(content)
    return digests


def verify_version(snapshot, expected):
    reader = reader_of(snapshot)
    report = snapshot.verify()
    assert report.ok, report.problems
    for name in shard_files(reader):
        assert names.parse_attempt(name.rpartition("/")[2]) == reader.manifest.attempt
    assert [tuple(leaf.shape) for i in reader.indexes() for leaf in i.leaves]
    state = initial_state()
    load_snapshot(reader, state, group=current_group())
    assert states_equal(state, expected), f"{snapshot.url} contains a different state"


def has_manifest(run, folder):
    return any(s.key == f"{folder}/{names.MANIFEST}" for s in run.store.list(folder))


def shard_files(snapshot):
    return [path for s in snapshot.manifest.shards for path in (s.path, s.index_path)]


def check_visible_versions(run, versions, lineage):
    """Check promises 2 and 5: only versions with a manifest exist, and only the lineage counts."""
    listing = run.listing()
    for version in set(listing.folders) - versions:
        with pytest.raises(NotFound):
            run.open(version)
    assert set(lineage) <= versions
    assert [s.version for s in run.snapshots()] == lineage
    latest = run.latest()
    assert (latest and latest.version) == (lineage[-1] if lineage else None)


def check_resume(store, newest, expected):
    """Check promise 5: resume loads the newest version, and the next step can be saved.

    The folder of the next step can contain files of an earlier attempt.
    """
    state = initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        resumed = ckpt.resume()
        assert (resumed.step if resumed else 0) == newest
        assert states_equal(state, expected(newest))
        ckpt.step({"loss": train_step(state)})
        saved = ckpt.wait()
    assert saved is not None
    assert saved.step == newest + 1


def check_no_orphans(run):
    """Check promise 6: after a sweep, every file is referenced."""
    listing = run.listing()
    referenced = {names.branch_name(number) for number in listing.branches}
    for version in listing.versions:
        snapshot = run.open(version)
        referenced |= {
            reader_of(snapshot).location.file_key(name)
            for name in (*shard_files(reader_of(snapshot)), names.MANIFEST)
        }
        files = [stat.key for stat in run.catalog.files(version, listing).stats]
        referenced |= {f for f in files if names.parse_evaluation(f.rpartition("/")[2])}
    assert {s.key for s in run.store.list("")} == referenced
    assert list(run.store.partials("")) == []


@contextmanager
def all_pins_dead():
    """Treat every pin as held by a dead process."""
    with mock.patch.object(pins, "is_holder_alive", return_value=False):
        yield


@contextmanager
def pins_unchanged():
    yield
