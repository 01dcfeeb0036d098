"""A committed snapshot, looked at lazily: the manifest at first, all else when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import numpy as np

from holdfast.buffers import shared_pool
from holdfast.engine.planning.read_plan import ReadRequest, make_read_plan
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.index_files import check_length, read_index
from holdfast.engine.snapshot.leaf import LeafView
from holdfast.engine.snapshot.location import Location, Url, describe_run, locate, versions_in
from holdfast.engine.snapshot.read import Target, execute_read_plan
from holdfast.engine.snapshot.verify import CheckedChunks, Report, verify
from holdfast.errors import DigestMismatch, FormatError, ManifestInvalid, NotFound
from holdfast.format import tree
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import LeafSchema, SchemaCache
from holdfast.format.manifest import MAX_MANIFEST, Manifest, Shard, ShardReference, decode_manifest
from holdfast.format.names import MANIFEST, Version, parse_reference, parse_version, split_address
from holdfast.format.validate import LeafSpecs, check_plain, check_tree
from holdfast.ragged import Ints
from holdfast.settings import read_settings
from holdfast.threads import gc_paused


def open_snapshot(url: Url) -> Snapshot:
    """The snapshot at ``url``; only its manifest is read.

    Raises ``NotFound`` if there is none, ``FormatError`` if its manifest is damaged.
    """
    return open_location(locate(url))


@gc_paused()
def open_location(location: Location) -> Snapshot:
    """As ``open_snapshot``, for a location."""
    file = location.key(MANIFEST)
    try:
        raw = location.store.get(file, MAX_MANIFEST)
    except NotFound as e:
        if versions := versions_in(location):
            raise NotFound(
                f"{location.url} is {describe_run(versions)}, not a snapshot",
                todo=f"Name one of them, such as {location.url}/{versions[-1]}",
                key=file,
                store=location.store.url,
                versions=len(versions),
            ) from e
        raise NotFound(
            f"There is no snapshot at {location.url}",
            expected=f"a folder with a {MANIFEST}",
            found="none",
            todo=_missing_snapshot_advice(location.url),
            key=file,
            store=location.store.url,
        ) from e
    return Snapshot(location, *decode_manifest(raw, file))


def _missing_snapshot_advice(url: str) -> str:
    """What to do where there is no snapshot at ``url``."""
    run, version = split_address(url)
    if version is None:
        return (
            "`holdfast ls RUN` shows the versions of a run; a folder without a manifest is a save"
            " that was never committed"
        )
    step, _, branch = version.partition(".")
    found = f"run.open(run.find({step}{f', branch={branch}' if branch else ''}))"
    if version == "latest":
        found = "run.latest()"
    return (
        f"Ask the run for it: run = holdfast.Run({run!r}), then {found}, whose url holdfast.load"
        " takes"
    )


class Snapshot:
    """An immutable, committed state. Made by ``holdfast.open``, ``save`` and ``Run``.

    Without a ``manifest``, that of ``digest`` is read when it is asked for.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest | None,
        digest: str,
        leaves: LeafSpecs | None = None,
    ) -> None:
        self.location = location
        self.digest = digest
        self._manifest = manifest
        self._leaves = leaves
        if manifest is not None and leaves is None:  # not checked by who has just committed it
            self._leaves = self._check_manifest(manifest)
        self._nodes: dict[str, Any] | None = None
        self._indexes: list[ShardIndex] | None = None

    def __repr__(self) -> str:
        return f"<Snapshot {self.url} step={self.step} leaves={len(self.leaves)}>"

    @property
    def manifest(self) -> Manifest:
        """What the commit has written. Raises ``FormatError``, ``StoreError`` if it has still to be
        read: another rank has committed it."""
        if self._manifest is None:
            there = open_location(self.location)
            if there.digest != self.digest:
                raise DigestMismatch(
                    f"{self.url} is not what was committed there",
                    expected=f"digest {self.digest}",
                    found=there.digest,
                    todo="Look for a second job that writes to the same run",
                    file=self.location.key(MANIFEST),
                )
            self._manifest, self._leaves = there.manifest, there.leaves
        return self._manifest

    @property
    def leaves(self) -> LeafSpecs:
        """Leaves with bytes: key to (dtype name, global shape)."""
        if self._leaves is None:
            self._leaves = self._check_manifest(self.manifest)
        return self._leaves

    def _check_manifest(self, manifest: Manifest) -> LeafSpecs:
        file = self.location.key(MANIFEST)
        check_plain(manifest.metadata, "metadata", file)
        return check_tree(manifest.tree, file)

    @property
    def url(self) -> str:
        return self.location.url

    @property
    def step(self) -> int | None:
        """The training step after which it was saved."""
        return self.manifest.step

    @property
    def version(self) -> Version:
        """Step and branch, as the folder's name has them. Raises ``ManifestInvalid`` if it is
        not named like a version of a run, or if its manifest says another step or branch."""
        name = parse_version(self.location.folder.rpartition("/")[2])
        said = (self.manifest.step, self.manifest.branch)
        if name is None or (name.step, name.branch) != said:
            raise ManifestInvalid(
                f"{self.url} is not where it was saved",
                expected="a folder whose name is version_STEP or version_STEP.BRANCH",
                found=f"a manifest of step {said[0]} on branch {said[1]}",
                todo="Give the folder its name back",
                file=self.location.key(MANIFEST),
            )
        return name

    @property
    def created(self) -> str:
        """The time of day (UTC, ISO 8601) by the clock of the machine that saved it."""
        return self.manifest.created

    @property
    def metadata(self) -> dict[str, Any]:
        """``reason``, ``metrics``, ``note`` and ``statistics`` of the save."""
        made: dict[str, Any] = tree.decode(self.manifest.metadata, "metadata", tree.reject_value)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of its own shards."""
        return sum(s.length for s in self.manifest.shards)

    @property
    def bases(self) -> frozenset[Version]:
        """The versions whose files it refers to; empty for a full one."""
        paths = [parse_reference(f.path) for f in self._referred_files()]
        return frozenset(p[0] for p in paths if p is not None)

    @property
    def referred_bytes(self) -> int:
        """Bytes that it refers to in files of its bases."""
        return sum(f.bytes for f in self._referred_files())

    @property
    def chain(self) -> int:
        """How many versions lie between it and a full one: 0 for a full one."""
        return self.manifest.chain

    def _referred_files(self) -> list[ShardReference]:
        return [f for s in self.manifest.shards for f in s.refers]

    def nodes(self) -> dict[str, Any]:
        """The tree's leaves and plain values by key, in order, as ``format/tree.py`` has them."""
        if self._nodes is None:
            self._nodes = dict(tree.walk(self.manifest.tree))
        return self._nodes

    def keys(self) -> list[str]:
        """The keys of all leaves and plain values, in the state's order."""
        return list(self.nodes())

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes())

    def __contains__(self, key: object) -> bool:
        return key in self.nodes()

    def __getitem__(self, key: str) -> Any:
        """A plain value, or a ``LeafView`` of a tensor or array. Raises ``KeyError``."""
        if key not in self.nodes():
            below = [k for k in self.nodes() if k.startswith(f"{key}/")]
            near = below or list(self.nodes())
            more = ", ..." if len(near) > 5 else ""
            found = f"{'below it are' if below else 'there are'} {', '.join(near[:5])}{more}"
            raise KeyError(f"{key} is neither a leaf nor a plain value; {found}")
        node = self.nodes()[key]
        if type(node) is dict and next(iter(node)) in (*tree.LEAF_TAGS, "tied"):
            return LeafView(self, key, node)
        return tree.decode(node, key, tree.reject_value)

    def indexes(self) -> list[ShardIndex]:
        """The indexes of all shards, read once, checked against manifest and tree.

        The files' lengths are checked first. Raises ``FormatError`` or ``StoreError``:
        ``NotFound`` if it has been deleted.
        """
        if self._indexes is None:
            with self.not_found_if_deleted():
                self._indexes = self.read_indexes()
        return self._indexes

    @gc_paused()
    def read_indexes(self) -> list[ShardIndex]:
        """As ``indexes``, read anew; also before there is a manifest."""
        self.check_lengths(self.manifest.shards)
        alike = SchemaCache()
        indexes = [read_index(self.location, s, alike) for s in self.manifest.shards]
        self._check_indexes(indexes)
        return indexes

    @gc_paused()
    def set_indexes(self, indexes: list[ShardIndex]) -> None:
        """Check and keep the indexes of all shards, which another way has brought here."""
        self._check_indexes(indexes)
        self._indexes = indexes

    def _check_indexes(self, indexes: Sequence[ShardIndex]) -> None:
        leaves, sums = self.leaves, dict[LeafSchema, Ints]()
        for index in indexes:
            kinds, have = index.leaves.schema, index.leaves.stored_numels()
            if kinds in sums:
                have = np.minimum(have + sums[kinds], 1 << 62)  # the next sum has 64 bits too
            else:  # shards that have the same leaves need one look at them
                for key, *kind in zip(kinds.keys, kinds.dtypes, kinds.shapes, strict=True):
                    if leaves.get(key) != tuple(kind):
                        raise self._contradiction_error(
                            f"leaf {key} as {leaves.get(key)}",
                            f"{tuple(kind)} in the index of {index.shard}",
                            key,
                        )
            sums[kinds] = have
        stored: Counter[str] = Counter()
        for kinds, have in sums.items():
            for key, elements in zip(kinds.keys, have.tolist(), strict=True):
                stored[key] += elements
        for key, (_, shape) in leaves.items():
            # so a shape asks for no more memory than there are bytes behind it
            if key not in stored or stored[key] < prod(shape):
                found = f"{stored[key]} in the indexes"
                raise self._contradiction_error(
                    f"{prod(shape)} elements of leaf {key[:200]!r}", found, key
                )

    def _contradiction_error(self, expected: str, found: str, leaf: str) -> ManifestInvalid:
        return ManifestInvalid(
            f"Manifest and indexes of {self.url} contradict each other",
            expected=expected,
            found=found,
            todo="Take another version; this one was not written by a correct Holdfast",
            file=self.location.key(MANIFEST),
            leaf=leaf,
        )

    def check_files(self) -> None:
        """See that every file, of its bases too, is there with its length, without reading it.

        Raises ``FormatError`` for a file that is missing or has another length, ``NotFound`` if
        the version has been deleted.
        """
        with self.not_found_if_deleted():
            self.check_lengths(self.manifest.shards)

    def check_lengths(self, shards: Sequence[Shard]) -> None:
        """As ``check_files``, of some shards."""
        for shard in shards:
            for name, length in (
                (shard.name, shard.length),
                (shard.index.name, shard.index.length),
                *((f.path, f.length) for f in shard.refers),
            ):
                check_length(self.location, name, length)

    def read(
        self,
        wants: Sequence[ReadRequest],
        targets: Sequence[Target],
        advance: Callable[[], object] = bool,
    ) -> None:
        """Fill the targets with what is wanted, checked, calling ``advance`` after each part.
        Raises ``FormatError``, ``StoreError``: ``NotFound`` if it has been deleted."""
        indexes = self.indexes()
        with gc_paused():
            plan = make_read_plan(indexes, wants)
        threads = read_settings().threads
        with self.not_found_if_deleted():
            execute_read_plan(
                self.location, plan, indexes, targets, shared_pool(), threads, advance
            )

    def verify(
        self, progress: Callable[[int], None] | None = None, seen: CheckedChunks | None = None
    ) -> Report:
        """Read every byte of every file, and all that it refers to, and compare it with its digest.

        ``seen``: chunks that were read for other versions; they are not read again. Never raises
        for damage: the report names all of it. ``progress(nbytes)`` is called as bytes are done,
        from several threads. Raises ``NotFound`` if it has been deleted.
        """
        with self.pin_while_reading():
            report = verify(self.location, self.manifest, self.leaves, self.indexes, progress, seen)
        if not report.ok:
            self._raise_if_deleted()
        return report

    @contextmanager
    def not_found_if_deleted(self) -> Iterator[None]:
        """Files of a version that is being deleted are missing, but it is not damaged."""
        try:
            yield
        except (FormatError, NotFound):
            self._raise_if_deleted()
            raise

    def _raise_if_deleted(self) -> None:
        """Raise ``NotFound`` if the manifest, which goes first, is gone."""
        file = self.location.key(MANIFEST)
        try:
            self.location.store.stat(file)
        except NotFound as e:
            raise NotFound(
                f"{self.url} was deleted while it was read",
                todo="Take another version; `holdfast pin RUN STEP` keeps one for good",
                key=file,
                store=self.location.store.url,
            ) from e

    def pin_while_reading(self) -> AbstractContextManager[None]:
        """Keeps it from being deleted while it is read, if it is large. Raises ``NotFound``."""
        return pins.pin_while_reading(self.location, self.nbytes + self.referred_bytes, self.bases)
