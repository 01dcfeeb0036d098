"""The public ``Snapshot``: a committed state as a mapping. A ``SnapshotReader`` reads it.

The packages below use readers only, so that users cannot come to depend on internal names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from math import prod
from typing import Any, Literal

from limpet.errors import LimpetError
from limpet.format import torch_types, tree
from limpet.format.names import Version
from limpet.loading.differences import Leniency
from limpet.loading.load import load_snapshot
from limpet.ranks.group import Group, GroupSpec, broadcast_from_first, current_group
from limpet.sinks.terminal import default_terminal
from limpet.snapshot.leaf import LeafView
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.verify import CheckedChunks, Report
from limpet.text import format_count, format_list, format_size, to_printable, truncate
from limpet.threads import gc_paused
from limpet.tracebacks import short_tracebacks
from limpet.types import DTYPES

_MAX_LISTED = 6
"""The largest number of members in a ``repr``."""

_MAX_NAME = 80
_CONTAINER_TAGS = ("dict", "ordered", "items", "list", "tuple", "sparse")


class SubtreeView(Mapping[str, Any]):
    """The members below one key of a snapshot, such as ``snapshot["model"]``.

    The keys are relative to it and, as in the snapshot, name the leaves and plain values at any
    depth: ``snapshot["model"]["fc.weight"]``. A key of a container returns another view. A view
    reads nothing, and is valid as long as the snapshot.
    """

    def __init__(self, snapshot: Snapshot, key: str, node: Any) -> None:
        self.key = key
        self._snapshot, self._node = snapshot, node

    @cached_property
    def _relative_keys(self) -> list[str]:
        return [k[len(self.key) + 1 :] for k, _ in tree.walk(self._node, self.key)]

    def __len__(self) -> int:
        return len(self._relative_keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._relative_keys)

    def __contains__(self, key: object) -> bool:
        return f"{self.key}/{key}" in self._snapshot

    def __getitem__(self, key: str) -> Any:
        """Return what ``snapshot[f"{view.key}/{key}"]`` returns. Raises ``KeyError``."""
        if key not in self:
            raise KeyError(missing_key(key, list(self), f" of {self.key}, and relative to it"))
        return self._snapshot[f"{self.key}/{key}"]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements of its leaves."""
        known = reader_of(self._snapshot).leaves
        leaves = (known[k] for k, _ in tree.walk(self._node, self.key) if k in known)
        return sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in leaves)

    def __repr__(self) -> str:
        key, keys = truncate(to_printable(self.key), _MAX_NAME), format_count(len(self), "key")
        size = f", {format_size(self.nbytes)}" if self.nbytes else ""
        return f"<SubtreeView {key}: {keys}{size}: {describe_members(self._node, self.key)}>"


def missing_key(key: object, known: list[str], of: str = "") -> str:
    return f"{key} is not a key{of}; the keys are {format_list(known, 5) or 'none'}"


@gc_paused
def describe_members(node: Any, key: str) -> str:
    """Return the names of the first members of a dict, list, tuple, or sparse tensor."""
    members = tree.members(node, key)  # None: a sparse tensor
    keys = [k for k, _ in tree.walk(node, key)] if members is None else [k for _, k in members]
    names = [truncate(to_printable(k.rpartition("/")[2]), _MAX_NAME) for k in keys[:_MAX_LISTED]]
    return format_list(names, _MAX_LISTED, total=len(keys)) or "empty"


def walk_containers(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the node of every dict, list, tuple, and sparse tensor below a node."""
    for child, k in tree.members(node, key) or ():
        if tree.tag_of(child) in _CONTAINER_TAGS:
            yield k, child
            yield from walk_containers(child, k)


@short_tracebacks
class Snapshot:
    """An immutable, committed state. ``limpet.open``, ``limpet.save``, and ``Run`` return it.

    It maps the keys of all leaves and plain values, in the state's order, to ``LeafView`` objects
    and plain values. Only the manifest is read to open it.
    """

    def __init__(self, reader: SnapshotReader) -> None:
        if not isinstance(reader, SnapshotReader):
            raise LimpetError(f"To open a snapshot, write limpet.open({reader!r})")
        self._reader = reader

    def __repr__(self) -> str:
        if not self._reader.is_open:  # nothing is read for this
            return f"<Snapshot {self.url}, not read yet>"
        step = "" if self.step is None else f" step {self.step},"
        size = format_size(self.nbytes + self.referred_bytes)
        members = describe_members(self._reader.manifest.tree, "")
        return f"<Snapshot {to_printable(self.url)}:{step} {size}: {members}>"

    def __eq__(self, other: object) -> bool:
        """Return True for another ``Snapshot`` of the same reader, such as what a second
        ``Checkpointer.save`` at one step returns."""
        return isinstance(other, Snapshot) and self._reader is other._reader

    def __hash__(self) -> int:
        return hash(self._reader)

    @property
    def url(self) -> str:
        """The location of the snapshot."""
        return self._reader.url

    @property
    def step(self) -> int | None:
        """The training step after which the snapshot was saved."""
        return self._reader.step

    @property
    def version(self) -> Version:
        """The step and the branch in the folder's name. Raises ``ManifestInvalid`` if that is not
        the name of a version, or if the manifest has another step or branch."""
        return self._reader.version

    @property
    def created(self) -> str:
        """The time of the save (UTC, ISO 8601), by the clock of the machine that saved it."""
        return self._reader.manifest.created

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``reason``, ``metrics``, ``note``, and ``statistics`` of the save, the ``devices`` of
        the tensors, and the ``config`` of a ``Checkpointer`` and ``objectives`` of its policies."""
        return self._reader.metadata

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save. ``Run.metrics`` has those of evaluations, too."""
        return self._reader.metrics

    @property
    def tree(self) -> Any:
        """The state as it was saved, a dict, with a ``LeafView`` for each tensor and array, and a
        ``SubtreeView`` for each sparse tensor. Nothing is read."""
        return tree.decode(self._reader.manifest.tree, "", self._view)

    @property
    def nbytes(self) -> int:
        """The total size of the snapshot's own shards, in bytes."""
        return self._reader.nbytes

    @property
    def bases(self) -> frozenset[Version]:
        """The base versions, whose files this one refers to; empty for a full version."""
        return self._reader.bases

    @property
    def referred_bytes(self) -> int:
        """The number of bytes in files of base versions that this version refers to."""
        return self._reader.referred_bytes

    @property
    def chain(self) -> int:
        """The number of versions from this one back to a full version; 0 for a full version."""
        return self._reader.manifest.chain

    def keys(self) -> list[str]:
        """Return the keys of all leaves and plain values, in the state's order."""
        return list(self._reader.nodes())

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.nodes())

    def __len__(self) -> int:
        """Return the number of leaves and plain values."""
        return len(self._reader.nodes())

    def __bool__(self) -> bool:
        return True  # also without a leaf

    def __contains__(self, key: object) -> bool:
        return key in self._reader.nodes() or key in self._containers

    def __getitem__(self, key: str) -> Any:
        """Return a plain value, a ``LeafView`` of a tensor or array, or a ``SubtreeView`` of the
        members below ``key``. A list or tuple of plain values is one value. Raises ``KeyError``."""
        nodes = self._reader.nodes()
        if key in nodes:
            return tree.decode(nodes[key], key, self._view)
        if key not in self._containers:
            raise KeyError(missing_key(key, self.keys()))
        node = self._containers[key]
        is_sequence = tree.tag_of(node) in ("list", "tuple")
        if is_sequence and not any(tree.is_leaf(n) for _, n in tree.walk(node, key)):
            return tree.decode(node, key, self._view)
        return SubtreeView(self, key, node)

    def _view(self, node: Any, key: str) -> Any:
        """Return a view of a node that is no plain value, or the value of a type of torch."""
        if not torch_types.TAGS.isdisjoint(node):
            return torch_types.decode(node, key)
        is_subtree = "sparse" in node
        return SubtreeView(self, key, node) if is_subtree else LeafView(self._reader, key, node)

    @cached_property
    @gc_paused
    def _containers(self) -> dict[str, Any]:
        """The tree's dicts, lists, tuples, and sparse tensors by key, but the root."""
        return dict(walk_containers(self._reader.manifest.tree))

    def verify(
        self, progress: Callable[[int], None] | None = None, seen: CheckedChunks | None = None
    ) -> Report:
        """Read every byte of every file, and every byte referred to, and check all digests.

        ``seen``: chunks that were read for other versions. They are not read again. Damage does not
        raise an error; the report lists all of it. ``progress(nbytes)`` is called from several
        threads as bytes are checked. Raises ``NotFound`` if the snapshot was deleted.
        """
        return self._reader.verify(progress, seen)

    def load(  # noqa: PLR0913  (as limpet.load)
        self,
        into: Mapping[str, Any] | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        missing: Literal["error", "keep"] | list[str] = "error",
        unexpected: Literal["error", "ignore"] | list[str] = "error",
        cast: bool = False,
        rename: Mapping[str, str] | None = None,
        mismatched: Literal["error", "keep"] | list[str] = "error",
        group: GroupSpec = None,
        timeout: float | None = None,
    ) -> Any:
        """Load the snapshot, and check every byte that is read: see ``limpet.load``.

        The manifest is read again. Raises ``NotFound`` if the snapshot was deleted, and
        ``DigestMismatch`` if another one has replaced it.
        """
        leniency = Leniency(missing, unexpected, cast, rename or {}, mismatched)
        ranks = Group() if into is None else current_group(group)
        reader = open_again(self, ranks, timeout)
        return load_and_show(reader, into, keys, device, leniency, ranks)


def load_and_show(
    reader: SnapshotReader,
    into: Mapping[str, Any] | None,
    keys: str | Sequence[str] | None,
    device: Any,
    leniency: Leniency,
    group: Group,
) -> Any:
    """Load a snapshot for a public call, which shows what was kept, ignored, or converted."""
    with ExitStack() as shown:
        if into is not None:
            shown.callback(default_terminal.open(reader.url))
        return load_snapshot(reader, into, keys, device, leniency, group)


def snapshot_of(reader: SnapshotReader | None) -> Snapshot | None:
    """Return what a user gets for the reader of a version, if there is one."""
    return None if reader is None else Snapshot(reader)


def reader_of(snapshot: Snapshot) -> SnapshotReader:
    """Return the reader of a snapshot that a user passed, or that a public function returned."""
    return snapshot._reader


def open_again(
    snapshot: Snapshot, group: Group | None = None, timeout: float | None = None
) -> SnapshotReader:
    """Read the manifest of a snapshot again, on all ranks: it must be the one of rank 0. Raises
    ``NotFound`` or ``DigestMismatch``."""
    location = reader_of(snapshot).location.without_limit().limit("load", timeout)
    reader = SnapshotReader(location, None, reader_of(snapshot).digest)
    # as open_on_all_ranks does, because another rank may have the address of this snapshot
    _, digest = broadcast_from_first(
        group or Group(),
        f"the opening of {location.name}",
        lambda: (reader.url, reader.digest),
        tuple[str, str],
        on_each=lambda: reader.manifest,
        deadline=location.deadline,
    )
    return reader if digest == reader.digest else SnapshotReader(location, None, digest)
