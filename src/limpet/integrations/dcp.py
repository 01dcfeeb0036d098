"""``torch.distributed.checkpoint`` (DCP) on top of this engine.

DCP makes the plans, gathers them, and reports errors; this module converts its plans to boxes. An
*FQN* (fully qualified name) is DCP's name of a leaf, such as ``model.fc.weight``.
"""

from __future__ import annotations

import io
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from limpet import errors, events, machine
from limpet.format import names, tree
from limpet.format.manifest import Manifest
from limpet.format.rejected import unsupported
from limpet.integrations import dcp_names as fqns
from limpet.layout.global_plan import make_global_plan
from limpet.layout.local_plan import make_local_plan
from limpet.layout.shard_layout import LeafBox
from limpet.lazy_torch import rank_and_world_size
from limpet.loading.snapshot import Snapshot
from limpet.loading.targets import LoadTargets
from limpet.run.address import open_reader
from limpet.saving.commit import (
    Receipt,
    VersionMetadata,
    check_receipts,
    put_manifest,
    raise_if_exists,
)
from limpet.saving.image import make_image, split_into_pieces, synchronize
from limpet.saving.write import write_index, write_shard
from limpet.snapshot import pins as pin
from limpet.snapshot.location import Location, Url, locate
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays import part_library
from limpet.state.flatten import LocalLeaf
from limpet.text import format_list
from limpet.threads import Workers, no_op
from limpet.types import Box
from limpet.version import __version__

__all__ = ["StorageReader", "StorageWriter"]

METADATA_KEY = "dcp"
"""Member of a manifest's ``metadata`` if DCP saved the snapshot; its blobs are DCP's pickles."""


class SnapshotStorage:
    """The methods that DCP calls on a writer and on a reader of the snapshot at ``url`` alike."""

    url: Url | Snapshot

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.url if isinstance(self.url, str | os.PathLike) else self.url.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            locate(checkpoint_id)
        except errors.LimpetError:
            return False
        return True

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


def completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# -- saving --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SaveRank:
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class _WrittenItem:
    """A rank's report on one item that it wrote: its path in the state, its box, and its node."""

    path: fqns.ObjectPath
    leaf_box: LeafBox
    node: Any


@dataclass(frozen=True, slots=True)
class _PinnedReceipt:
    """The receipt of a rank, and the key of the pin that protects its files until the commit."""

    receipt: Receipt
    pin_key: str | None


@dataclass(slots=True, weakref_slot=True)
class _ActiveSave:
    """A save in progress on one rank. ``release_pin`` is called if it fails; the coordinator
    removes the pins of all ranks after the commit, else the end of this object does."""

    location: Location
    version: names.Version | None
    attempt: str
    began: float
    release_pin: Callable[[], object] = no_op

    def pin_files(self) -> str:
        """Pin the files of this rank until the commit, and return the key of the pin."""
        key = pin.create_pin(self.location, self.attempt)
        self.release_pin = finalize = weakref.finalize(self, pin.remove_pin, self.location, key)
        # a pin ends with its process, and a forked child must not remove the pin of its parent
        finalize.atexit = False
        return key


class StorageWriter(SnapshotStorage, storage.StorageWriter):
    """Save through DCP as the snapshot at ``url``::

        dcp.save(state, storage_writer=StorageWriter("runs/a/version_100"))

    ``dcp.async_save`` works as well. The coordinator commits the snapshot by writing the manifest,
    after all ranks have written and synced their shards. If one rank fails, all ranks raise, and
    nothing was committed. A snapshot is never modified: if there is already one at ``url``, the
    save raises ``AlreadyExists``. DCP wraps errors in its own ``CheckpointException``, whose
    ``failures`` contain them by rank.

    ``save_id`` is a unique name that planners receive. The snapshot records the coordinator's.
    Raises ``Unsupported`` for ``_extensions``, with which DCP's own writer transforms its files. A
    save with ``use_collectives=False`` on several ranks raises it, too.
    """

    url: Url

    def __init__(self, url: Url, *, _extensions: Sequence[Any] | None = None) -> None:
        super().__init__()
        if _extensions:
            raise errors.Unsupported(
                "A StorageWriter cannot apply _extensions: its files are plain safetensors",
                found=format_list([type(e).__name__ for e in _extensions], 5),
                todo="Omit _extensions; compress or encrypt where the files are stored",
            )
        self.url = url
        self.save_id = names.random_id()
        self._save: _ActiveSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Omit the active save: DCP pickles the writer for another process before a save begins."""
        return {**self.__dict__, "_save": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.url = checkpoint_id
        self.save_id = names.random_id()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if rank_and_world_size()[1] > 1 and not kwargs.get("use_collectives", True):
            raise errors.Unsupported(
                "A StorageWriter cannot save with use_collectives=False: one snapshot has the state"
                " of all ranks",
                todo='Omit use_collectives; or call limpet.save(url, state, group="alone") on each'
                " rank, with a URL of its own",
            )
        location = locate(self.url)
        version = names.parse_version(location.folder.rpartition("/")[2])
        self._save = _ActiveSave(location, version, names.random_id(), time.perf_counter())
        if is_coordinator:
            raise_if_exists(location)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(p, storage_data=_SaveRank(i, len(plans))) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save, save_rank = self._active_save(), plan.storage_data
        if not isinstance(save_rank, _SaveRank):  # DCP cached the plan of a save by another writer
            rank, world_size = rank_and_world_size()
            save_rank = _SaveRank(rank, world_size)
        try:
            resolved = [_resolve_item(item, planner, plan.planner_data) for item in plan.items]
            results = [
                WriteResult(item.index, written.leaf_box.nbytes, written)
                for item, (written, _) in zip(plan.items, resolved, strict=True)
            ]
            results.append(_write_rank_shard(save, save_rank, [leaf for _, leaf in resolved]))
        except BaseException:
            save.release_pin()
            raise
        return completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._active_save()
        pinned_receipts = [
            r.storage_data
            for rank in results
            for r in rank
            if isinstance(r.storage_data, _PinnedReceipt)
        ]
        try:
            metadata.storage_meta = self.storage_meta()
            snapshot = _commit(save, metadata, results, [p.receipt for p in pinned_receipts])
        finally:
            for key in filter(None, (p.pin_key for p in pinned_receipts)):
                pin.remove_pin(save.location, key)
        metadata.storage_data = {}
        seconds = time.perf_counter() - save.began
        events.emit("committed", url=snapshot.url, bytes=snapshot.nbytes, seconds=seconds)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _active_save(self) -> _ActiveSave:
        if self._save is None:
            raise errors.PlanError(
                "A method of a StorageWriter was called before a save has begun",
                todo="Pass it to torch.distributed.checkpoint.save, which calls its methods",
            )
        return self._save


def _resolve_item(
    item: WriteItem, planner: SavePlanner, planner_data: Any
) -> tuple[_WrittenItem, LocalLeaf]:
    """Return an item of DCP's plan, and its leaf. Raises ``ShapeMismatch`` and ``Unsupported``."""
    fqn = item.index.fqn
    path = fqns.path_of(fqn, planner_data)
    key = fqns.key_of(path)
    value = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        raw = np.asarray(value.getbuffer(), np.uint8)
        leaf_box = LeafBox(key, "uint8", raw.shape, Box.whole(raw.shape))
        leaf = LocalLeaf(key, "uint8", raw.shape, raw, leaf_box.box)
        return _WrittenItem(path, leaf_box, {"blob": ["bytes", raw.size]}), leaf
    data = item.tensor_data
    if data is None:
        raise unsupported(value, key, "DCP planned bytes, but its planner provides a tensor")
    tensor, dtype = _materialize_tensor(value, key)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if box.sizes != tuple(tensor.shape):
        raise errors.ShapeMismatch(
            f"The tensor that DCP's planner provides for {fqn!r} is not the part that it planned",
            expected=list(box.sizes),
            found=list(tensor.shape),
            todo="Check resolve_data of the planner",
            leaf=key,
        )
    shape = tuple(data.size)
    leaf = LocalLeaf(key, dtype, shape, tensor, box)
    node = {"tensor": [dtype, [*shape]]}
    return _WrittenItem(path, LeafBox(key, dtype, shape, box), node), leaf


def _materialize_tensor(value: Any, key: str) -> tuple[torch.Tensor, str]:
    """Return a strided tensor with these elements and its dtype, or raise ``Unsupported``."""
    wait = getattr(type(value), "trigger_wait", None)  # a collective may still be writing to it
    tensor = value if wait is None else wait(value)
    library = part_library(type(tensor))
    boxes = library.boxes_to_save(tensor, key) if type(tensor) in library.plain_types else None
    if boxes is None:
        raise unsupported(
            value, key, "DCP saves it as a tensor, and only strided tensors with data are supported"
        )
    ((_, part),) = boxes.box_tensors
    return part, boxes.dtype


def _write_rank_shard(
    save: _ActiveSave, save_rank: _SaveRank, leaves: list[LocalLeaf]
) -> WriteResult:
    """Write this rank's shard and index, pinned until the commit. Raises ``StoreError``."""
    # a box without elements is not written, unless the whole tensor has none
    leaves = [leaf for leaf in leaves if 0 not in leaf.box.sizes or 0 in leaf.shape]
    if save_rank.rank and not leaves:
        return WriteResult(
            MetadataIndex(""), 0, _PinnedReceipt(Receipt(save_rank.rank, None), None)
        )
    location = save.location
    boxes = [LeafBox(x.key, x.dtype, x.shape, x.box) for x in leaves]
    image = make_image([x.source for x in leaves], boxes)
    synchronize(image.sources)
    shard = names.shard_name(save_rank.rank, save_rank.world_size, save.attempt)
    pin_key = save.pin_files()
    pieces = split_into_pieces(len(image.header), image.length)
    digests = write_shard(location, shard, image, pieces, Workers.create())
    index = names.index_name(save_rank.rank, save_rank.world_size, save.attempt)
    entry = write_index(location, index, shard, image, digests)
    receipt = Receipt(save_rank.rank, entry)
    return WriteResult(MetadataIndex(shard), image.length, _PinnedReceipt(receipt, pin_key))


def _commit(
    save: _ActiveSave, metadata: Metadata, results: list[list[WriteResult]], receipts: list[Receipt]
) -> SnapshotReader:
    """Check the boxes of all ranks against DCP's plan and the files in the store, and commit.
    Raises ``CommitError`` and ``PlanError``."""
    location = save.location
    written = {r.index.fqn: r.storage_data for rank in results for r in rank}
    missing = [fqn for fqn in metadata.state_dict_metadata if fqn not in written]
    if missing:
        raise errors.CommitError(
            f"Nothing was committed to {location.url}: no rank wrote {len(missing)} planned leaves",
            expected=format_list(missing, 5),
            todo="Check what finish_plan of the planner omits",
            leaves=tuple(missing),
        )
    boxes = [
        [r.storage_data.leaf_box for r in rank if isinstance(r.storage_data, _WrittenItem)]
        for rank in results
    ]
    plan = make_global_plan([make_local_plan(rank_boxes) for rank_boxes in boxes])
    shards = check_receipts(location, receipts, len(results))
    root = _build_tree(metadata, [r.storage_data for rank in results for r in rank])
    statistics = {
        "bytes": sum(s.length for s in shards),
        "staged_seconds": 0.0,
        "written_seconds": round(time.perf_counter() - save.began, 6),
    }
    manifest = Manifest(
        attempt=save.attempt,
        created=machine.utc_now(),
        writer=f"limpet {__version__}",
        step=None if save.version is None else save.version.step,
        branch=0 if save.version is None else save.version.branch,
        parent=None,
        chain=0,
        shards=shards,
        metadata={
            "dict": {
                **VersionMetadata().to_node()["dict"],
                METADATA_KEY: _encode_dcp_metadata(root, metadata),
                "statistics": {"dict": statistics},
            }
        },
        tree=root,
    )
    return put_manifest(location, manifest, plan)


def _build_tree(metadata: Metadata, written: Sequence[Any]) -> Any:
    """Return the tree of everything that was written, in the order of the state."""
    leaves = {item.path: item.node for item in written if isinstance(item, _WrittenItem)}
    mapping = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths = (fqns.path_of(n, mapping) for n in mapping)
    return fqns.build_tree({path: leaves[path] for path in paths if path in leaves} | leaves)


def _encode_dcp_metadata(root: Any, metadata: Metadata) -> Any:
    """Encode what the tree does not contain of DCP's metadata. Raises ``Unsupported``."""
    members = {"save_id": metadata.storage_meta.save_id} if metadata.storage_meta else {}
    if metadata.planner_data != fqns.mapping_of(fqns.collect_entries(root, True)):
        members["planner_data"] = metadata.planner_data
    return tree.encode(members, "metadata/dcp", tree.reject_value)


# -- loading -------------------------------------------------------------------------------------


class StorageReader(SnapshotStorage, storage.StorageReader):
    """Load the snapshot at ``url`` through DCP, whether DCP or Limpet saved it::

        dcp.load(state, storage_reader=StorageReader("runs/a/version_100"))

    Every byte is checked before it is used. The leaf ``model/fc.weight`` has the FQN
    ``model.fc.weight`` in DCP and is loaded into ``state["model"]["fc.weight"]``. ``load_id`` is a
    unique name of the load.
    """

    def __init__(self, url: Url | Snapshot) -> None:
        super().__init__()
        self.url = url
        self.load_id = names.random_id()
        self._snapshot: SnapshotReader | None = None
        self._entries: dict[str, fqns.FqnEntry] = {}
        self._saved_by_dcp = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.url = checkpoint_id
        self.load_id = names.random_id()
        self._snapshot = None

    def read_metadata(self, *args: Any, rank: int | None = None, **kwargs: Any) -> Metadata:
        """Return DCP's metadata for the snapshot. If this fails, DCP calls it with a ``rank``, and
        would then load on this rank without the others."""
        if rank is not None:
            raise errors.Unsupported("A snapshot has the state of all ranks, not of one alone")
        snapshot = self._snapshot = open_reader(self.url)
        dcp_metadata = snapshot.metadata.get(METADATA_KEY)
        self._saved_by_dcp = dcp_metadata is not None
        dcp_metadata = dcp_metadata or {}
        self._entries = fqns.collect_entries(snapshot.manifest.tree, self._saved_by_dcp)
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for index in snapshot.indexes():
            for leaf in index.leaves:
                chunks.setdefault(leaf.key, []).extend(
                    ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes))
                    for b in leaf.boxes
                )
        state: dict[str, Any] = {}
        for fqn, entry in self._entries.items():
            state[fqn] = BytesStorageMetadata()
            if entry.is_tensor:
                source = entry.node.get("tied", entry.key)
                dtype, shape = snapshot.leaves[source]
                state[fqn] = TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), chunks[source]
                )
        return Metadata(
            state_dict_metadata=state,
            planner_data=dcp_metadata.get("planner_data", fqns.mapping_of(self._entries)),
            storage_data={fqn: entry.key for fqn, entry in self._entries.items()},
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id,
                save_id=dcp_metadata.get("save_id", snapshot.manifest.attempt),
                load_id=self.load_id,
            ),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._snapshot is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        digest = None if self._snapshot is None else self._snapshot.digest
        return replace(plan, storage_data=digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``PlanError`` if the ranks have found different versions at an address."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise errors.PlanError(
                f"The ranks have opened different versions at {self.checkpoint_id}",
                expected="one version",
                found="another one on some ranks, because the run has changed meanwhile",
                todo="Name the version by its step, such as RUN@120",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        snapshot = self._snapshot
        if snapshot is None:
            raise errors.PlanError(
                "read_data of a StorageReader was called before a load has begun",
                todo="Pass it to torch.distributed.checkpoint.load, which calls its methods",
            )
        targets = LoadTargets(snapshot)
        tensors, values = [], []
        for item in plan.items:
            entry = self._entries[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                values.append((item, targets.add_fresh(entry.node, entry.key, "cpu")))
            else:
                tensors.append((item, _add_target(item, entry, planner, targets)))
        with snapshot.pin_while_reading():
            snapshot.read(targets.requests, targets.targets)
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        for item, finalize in values:
            planner.load_bytes(item, _to_bytes_io(finalize(), self._saved_by_dcp))
        return completed_future(None)


def _add_target(
    item: ReadItem, entry: fqns.FqnEntry, planner: LoadPlanner, targets: LoadTargets
) -> torch.Tensor:
    """Add a read of the item into the tensor that the planner provides, and return that tensor.
    Raises ``ShapeMismatch`` if the tensor has another shape than the item."""
    tensor = planner.resolve_tensor(item).detach()
    sizes = tuple(item.lengths)
    if tuple(tensor.shape) != sizes:
        raise errors.ShapeMismatch(
            f"DCP's planner provides a tensor of the wrong shape for {item.dest_index.fqn!r}",
            expected=list(sizes),
            found=list(tensor.shape),
            todo="Check resolve_tensor of the planner",
            leaf=entry.key,
        )
    if 0 not in sizes:
        source = entry.node.get("tied", entry.key)
        chunk = item.storage_index.offset or (0,) * len(sizes)
        offsets = tuple(o + s for o, s in zip(chunk, item.storage_offsets, strict=True))
        targets.add(source, tensor, Box(offsets, sizes))
    return tensor


def _to_bytes_io(value: Any, is_pickled: bool) -> io.BytesIO:
    """Return what DCP's planner unpickles: DCP's own bytes, or a ``torch.save`` of the value."""
    if is_pickled:
        return io.BytesIO(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
