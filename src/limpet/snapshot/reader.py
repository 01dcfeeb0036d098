"""Opens a committed snapshot and reads it lazily: the manifest first, the rest on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from limpet.errors import DigestMismatch, FormatError, ManifestInvalid, NotFound
from limpet.format import tree
from limpet.format.index import ShardIndex
from limpet.format.manifest import MAX_MANIFEST, Manifest, Shard, decode_manifest
from limpet.format.names import MANIFEST, Version, parse_reference, parse_version
from limpet.format.tree import LeafSpecs, check_plain, check_tree
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.snapshot import pins
from limpet.snapshot.chunks import Target, execute_read_plan, read_workers
from limpet.snapshot.index_files import check_indexes, check_length, read_indexes
from limpet.snapshot.location import (
    Location,
    Url,
    describe_missing,
    describe_run,
    get_bounded,
    locate,
    versions_in,
)
from limpet.snapshot.verify import CheckedChunks, Report, verify
from limpet.threads import Workers, gc_paused, look_up_each, no_op


def open_snapshot(url: Url) -> SnapshotReader:
    """Open the snapshot at ``url``; reads only its manifest. Raises ``NotFound`` if there is none,
    and ``FormatError`` if it is damaged."""
    return open_location(locate(url))


@gc_paused
def open_location(location: Location, *, check_leaves: bool = True) -> SnapshotReader:
    """Do the same as ``open_snapshot`` for a location. Without ``check_leaves``, which takes most
    of the time, the tree and the metadata are not checked, and the leaves are not known."""
    file = location.key(MANIFEST)
    try:
        raw = get_bounded(location.store, file, MAX_MANIFEST)
    except NotFound as e:
        if versions := versions_in(location):
            raise NotFound(
                f"{location.url} is {describe_run(versions)}, not a snapshot",
                todo=f"Name one of them, such as {location.url}@latest or"
                f" {location.url}/{versions[-1]}",
                key=file,
                store=location.store.url,
                versions=len(versions),
            ) from e
        found, todo = describe_missing(location)
        raise NotFound(
            f"There is no snapshot at {location.url}",
            expected=f"a folder with a {MANIFEST}",
            found=found,
            todo=todo,
            key=file,
            store=location.store.url,
        ) from e
    manifest, digest = decode_manifest(raw, file)
    return SnapshotReader(location, manifest, digest, None if check_leaves else {})


class SnapshotReader:
    """Reads the files of a committed snapshot. ``Snapshot`` is its public side, and describes what
    both have. Without ``manifest``, the one with ``digest`` is read on first use."""

    left_out: Sequence[str] = ()  # members of a checkpoint of another library

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
        if manifest is not None and leaves is None:  # a caller that committed it passes its leaves
            self._leaves = self._check_manifest(manifest)
        self._nodes: dict[str, Any] | None = None
        self._indexes: list[ShardIndex] | None = None
        self.checked_headers: set[str] = set()

    def __repr__(self) -> str:
        return f"<SnapshotReader {self.url}>"

    @property
    def is_open(self) -> bool:
        """Whether the manifest was read."""
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        """The manifest that the commit wrote. The first use may read it, and raise ``FormatError``
        or ``StoreError``, if another rank committed the snapshot."""
        if self._manifest is None:
            stored = open_location(self.location)
            if stored.digest != self.digest:
                raise DigestMismatch(
                    f"The manifest of {self.url} is not the one that was committed or opened",
                    expected=f"digest {self.digest}",
                    found=stored.digest,
                    todo="Look for a second job that writes to the same run. If this one has saved"
                    " there again, open the snapshot again",
                    file=self.location.key(MANIFEST),
                )
            self._manifest, self._leaves = stored.manifest, stored.leaves
        return self._manifest

    @property
    def leaves(self) -> LeafSpecs:
        """The leaves that have bytes: a mapping from key to (dtype name, global shape)."""
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
        return self.manifest.step

    @property
    def version(self) -> Version:
        name = parse_version(self.location.folder.rpartition("/")[2])
        step, branch = self.manifest.step, self.manifest.branch
        if name is None or (name.step, name.branch) != (step, branch):
            raise ManifestInvalid(
                f"The folder name of {self.url} does not match its manifest",
                expected="a folder with the name version_STEP or version_STEP.BRANCH",
                found=f"a manifest of step {step} on branch {branch}",
                todo="Restore the original name of the folder",
                file=self.location.key(MANIFEST),
            )
        return name

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self.read_metadata()
        return metadata

    def metadata_node(self, *names: str) -> Any:
        """Return the node under these names in the metadata, maybe large or invalid, or None."""
        node = self.manifest.metadata
        for name in names:
            members = node.get("dict") if type(node) is dict else None
            node = members.get(name) if type(members) is dict else None
        return node

    def read_metadata(self, *names: str) -> Any:
        """Return what is under these names in the metadata, or None. The rest is not decoded."""
        return tree.decode(self.metadata_node(*names), "metadata", tree.reject_value)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save. Another program may have written others than 64-bit ints and
        floats by name: they are left out."""
        found = self.read_metadata("metrics")
        return {
            name: value
            for name, value in (found if isinstance(found, dict) else {}).items()
            if isinstance(name, str)
            and (type(value) is float or (type(value) is int and tree.is_int64(value)))
        }

    @property
    def nbytes(self) -> int:
        return sum(shard.length for shard in self.manifest.shards)

    @property
    def bases(self) -> frozenset[Version]:
        references = [parse_reference(f.path) for s in self.manifest.shards for f in s.refers]
        return frozenset(r[0] for r in references if r is not None)

    @property
    def referred_bytes(self) -> int:
        return sum(file.bytes for shard in self.manifest.shards for file in shard.refers)

    @gc_paused
    def nodes(self) -> dict[str, Any]:
        """Return the tree's nodes of leaves and plain values by key, in the state's order."""
        if self._nodes is None:
            self._nodes = dict(tree.walk(self.manifest.tree))
        return self._nodes

    def indexes(self) -> list[ShardIndex]:
        """Return the indexes of all shards, read once, and checked against the lengths of the
        files, the manifest, and the tree. Raises ``FormatError`` or ``StoreError``."""
        if self._indexes is None:
            with self.not_found_if_deleted():
                self._indexes = self.read_indexes()
        return self._indexes

    @gc_paused
    def read_indexes(self) -> list[ShardIndex]:
        """Do the same as ``indexes``, but read them again and do not keep them."""
        self.check_lengths(self.manifest.shards)
        indexes = read_indexes(self.location, self.manifest.shards)
        check_indexes(self.url, self.location.key(MANIFEST), self.leaves, indexes)
        return indexes

    @gc_paused
    def set_indexes(self, indexes: list[ShardIndex]) -> None:
        """Check and keep the indexes of all shards, which the caller received in another way."""
        check_indexes(self.url, self.location.key(MANIFEST), self.leaves, indexes)
        self._indexes = indexes

    def check_files(self) -> None:
        """Check the length of every file, including those of base versions. Raises ``FormatError``
        for a missing or wrong one, and ``NotFound`` if the snapshot was deleted."""
        with self.not_found_if_deleted():
            self.check_lengths(self.manifest.shards)

    def check_lengths(self, shards: Sequence[Shard]) -> None:
        """Check the lengths of some shards' files. Raises ``FormatError`` or ``StoreError``."""
        files: dict[tuple[str, int], None] = {}  # in order, each once
        for shard in shards:
            files[shard.path, shard.length] = None
            files[shard.index_path, shard.index.length] = None
            for file in shard.refers:
                files[file.path, file.length] = None
        look_up_each([*files], lambda file: check_length(self.location, *file))

    def read(
        self,
        requests: Sequence[ReadRequest],
        targets: Sequence[Target],
        advance: Callable[[], object] = no_op,
        *,
        check_headers: bool = True,
        workers: Workers | None = None,
    ) -> None:
        """Read boxes, check them, copy each into its target, and check the header of each own
        shard, once, unless ``check_headers`` is False. Raises ``FormatError`` or ``StoreError``."""
        indexes = self.indexes()
        checked = self.checked_headers if check_headers else None
        plan = gc_paused(make_read_plan)(indexes, requests, checked)
        with self.not_found_if_deleted():
            workers = workers or read_workers(self.location, advance)
            execute_read_plan(self.location, plan, indexes, targets, workers)
        self.checked_headers.update(plan.headers)

    def verify(
        self, progress: Callable[[int], None] | None = None, seen: CheckedChunks | None = None
    ) -> Report:
        with self.pin_while_reading():
            report = verify(self.location, self.manifest, self.leaves, self.indexes, progress, seen)
        if not report.ok:
            pins.require_manifest(self.location, "during the read")
        return report

    @contextmanager
    def not_found_if_deleted(self) -> Iterator[None]:
        """Replace an error in the ``with`` block by ``NotFound`` if the snapshot was deleted: its
        files are missing then, but it is not damaged."""
        try:
            yield
        except (FormatError, NotFound):
            pins.require_manifest(self.location, "during the read")
            raise

    def pin_while_reading(self) -> AbstractContextManager[None]:
        """Pin a large snapshot during a ``with`` block. Raises ``NotFound`` if it was deleted."""
        nbytes = self.nbytes + self.referred_bytes
        if nbytes < pins.MIN_PINNED_BYTES:
            return nullcontext()
        return pins.pin_while_reading(self.location, nbytes, self.bases)
