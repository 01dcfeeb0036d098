"""Saving through DCP: its plan as boxes of one shard a rank, and the commit."""

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
import torch.distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast import events, machine
from holdfast.buffers import shared_pool
from holdfast.engine.planning.global_plan import make_global_plan
from holdfast.engine.planning.local_plan import make_local_plan
from holdfast.engine.planning.shard_layout import LeafBox
from holdfast.engine.saving.commit import Receipt, check_receipts, put_manifest, raise_if_exists
from holdfast.engine.saving.image import make_image
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.staging import synchronize_streams
from holdfast.engine.saving.write import write_index, write_shard
from holdfast.engine.snapshot import pins as pin
from holdfast.engine.snapshot.location import Location, Url, locate
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.state.flatten import LocalLeaf
from holdfast.errors import CommitError, PlanError, ShapeMismatch, Unsupported
from holdfast.format import names, tree
from holdfast.format.manifest import IncrementalShard, Manifest
from holdfast.integrations.dcp import fqns
from holdfast.integrations.dcp.shared import (
    METADATA_KEY,
    completed_future,
    is_valid_url,
    to_checkpoint_id,
)
from holdfast.lazy_torch import dtype_name
from holdfast.settings import read_settings
from holdfast.types import Box
from holdfast.version import __version__


@dataclass(frozen=True, slots=True)
class _SaveRank:
    """A rank's number among the ranks of a save."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class _WrittenItem:
    """What a rank tells of one item that it wrote: its place in the nested state, and its box."""

    path: fqns.ObjectPath
    holding: LeafBox
    is_blob: bool


@dataclass(frozen=True, slots=True)
class _PinnedReceipt:
    """What a rank tells of its shard, and the key of the pin that keeps it until the commit."""

    receipt: Receipt
    pin_key: str | None


@dataclass(slots=True, weakref_slot=True)
class _ActiveSave:
    """One save under way, on one rank.

    ``let_go`` takes its pin away, if this rank fails. The coordinator does so for all ranks after
    the commit; where there is none, another rank having failed, it is done when this is gone.
    """

    location: Location
    attempt: str
    began: float
    release_pin: Callable[[], object] = bool

    def pin_files(self) -> str:
        """Pin the files of this rank until the commit; the pin's key."""
        key = pin.create_pin(self.location, self.attempt)
        self.release_pin = finalize = weakref.finalize(self, pin.remove_pin, self.location, key)
        finalize.atexit = False  # a pin ends with its process; a forked child has none to end
        return key


class StorageWriter(storage.StorageWriter):
    """Saves through DCP as the snapshot at ``url``; so does ``dcp.async_save``::

        dcp.save(state, storage_writer=StorageWriter("runs/a/version_100"))

    The commit is the manifest, put by the coordinating rank once all ranks have written and synced
    their shards; if one fails, all raise, and nothing was committed. A snapshot is never modified:
    where there is one already, ``AlreadyExists`` is raised. DCP wraps errors into its own
    ``CheckpointException``, whose ``failures`` hold them by rank.

    ``save_id``: a fresh name, given to planners; the coordinating rank's is kept in the snapshot.
    """

    def __init__(self, url: Url) -> None:
        super().__init__()
        self.url = url
        self.save_id = names.new_attempt()
        self._save: _ActiveSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Goes to another process before a save, so without one under way."""
        return {**self.__dict__, "_save": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return to_checkpoint_id(self.url)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.url = checkpoint_id
        self.save_id = names.new_attempt()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if not kwargs.get("use_collectives", True) and not alone:
            raise Unsupported(
                "DCP was told to save without collectives: each rank by itself",
                expected="ranks that make one snapshot together",
                found="use_collectives=False",
                todo="Leave use_collectives out; with no_dist=True each rank may save to a folder"
                " of its own",
            )
        self._save = _ActiveSave(locate(self.url), names.new_attempt(), time.perf_counter())
        if is_coordinator:
            raise_if_exists(self._save.location)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(p, storage_data=_SaveRank(i, len(plans))) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save, seat = self._active_save(), plan.storage_data
        if not isinstance(seat, _SaveRank):  # a plan that DCP kept from a save by another writer
            seat = _SaveRank(
                *(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            )
        try:
            taken = [_resolve_item(item, planner, plan.planner_data) for item in plan.items]
            leaves = [leaf for _, leaf in taken]
            done = [
                WriteResult(item.index, written.holding.nbytes, written)
                for item, (written, _) in zip(plan.items, taken, strict=True)
            ]
            done.append(_write_rank_shard(save, seat, leaves))
        except BaseException:
            save.release_pin()
            raise
        return completed_future(done)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._active_save()
        delivered = [
            r.storage_data
            for rank in results
            for r in rank
            if isinstance(r.storage_data, _PinnedReceipt)
        ]
        try:
            metadata.storage_meta = self.storage_meta()
            snapshot = _commit(save, metadata, results, [d.receipt for d in delivered])
        finally:
            for key in filter(None, (d.pin_key for d in delivered)):
                pin.remove_pin(save.location, key)
        metadata.storage_data = {}
        seconds = time.perf_counter() - save.began
        events.emit("committed", url=snapshot.url, bytes=snapshot.nbytes, seconds=seconds)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_valid_url(checkpoint_id)

    def _active_save(self) -> _ActiveSave:
        if self._save is None:
            raise PlanError(
                "A StorageWriter writes before a save has begun",
                todo="Give it to torch.distributed.checkpoint.save, which calls it in order",
            )
        return self._save


def _resolve_item(
    item: WriteItem, planner: SavePlanner, planner_data: Any
) -> tuple[_WrittenItem, LocalLeaf]:
    """An item of DCP's plan as a box, and where its bytes are."""
    fqn = item.index.fqn
    path = fqns.path_of(fqn, planner_data)
    key = fqns.key_of(path)
    value = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        raw = np.asarray(value.getbuffer(), np.uint8)
        holding = LeafBox(key, "uint8", raw.shape, Box.whole(raw.shape))
        return _WrittenItem(path, holding, True), LocalLeaf(
            key, "uint8", raw.shape, raw, holding.box
        )
    data = item.tensor_data
    if data is None:
        raise tree.unsupported(value, key, "DCP has planned bytes, its planner gives a tensor")
    tensor, dtype = _materialize_tensor(value, key)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if box.sizes != tuple(tensor.shape):
        raise ShapeMismatch(
            f"What DCP's planner gives for {fqn!r} is no part that it has planned",
            expected=list(box.sizes),
            found=list(tensor.shape),
            todo="See what resolve_data of the planner does",
            leaf=key,
        )
    shape = tuple(data.size)
    return _WrittenItem(path, LeafBox(key, dtype, shape, box), False), LocalLeaf(
        key, dtype, shape, tensor, box
    )


def _materialize_tensor(value: Any, key: str) -> tuple[torch.Tensor, str]:
    """A tensor whose bytes are those of its elements, and its dtype. Raises ``Unsupported``."""
    wait = getattr(type(value), "trigger_wait", None)  # a collective may still be filling it
    tensor = value if wait is None else wait(value)
    kinds = (torch.Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_nested:
        raise tree.unsupported(
            value, key, "DCP would pickle it as a tensor, here only strided ones"
        )
    if tensor.is_meta or (tensor.numel() and not tensor.data_ptr()):
        raise tree.unsupported(value, key, "it has no data; materialise it before saving")
    dtype = dtype_name(tensor.dtype)
    if dtype is None or tensor.is_quantized:
        raise tree.unsupported(value, key, f"the dtype {tensor.dtype} has no bytes to be written")
    return tensor.detach().resolve_conj().resolve_neg(), dtype


def _write_rank_shard(
    save: _ActiveSave, save_rank: _SaveRank, leaves: list[LocalLeaf]
) -> WriteResult:
    """Write this rank's shard and index, pinned until the commit. Raises ``StoreError``."""
    # a part without elements need not be written, unless the whole has none
    leaves = [leaf for leaf in leaves if 0 not in leaf.box.sizes or 0 in leaf.shape]
    if save_rank.rank and not leaves:
        return WriteResult(
            MetadataIndex(""), 0, _PinnedReceipt(Receipt(save_rank.rank, None), None)
        )
    place, pool, threads = save.location, shared_pool(), read_settings().threads
    image = make_image(leaves, [LeafBox(x.key, x.dtype, x.shape, x.box) for x in leaves])
    synchronize_streams(image.sources)
    shard = names.shard_name(save_rank.rank, save_rank.world_size, save.attempt)
    pinned = save.pin_files()
    digests = write_shard(place, shard, image, image.pieces(), pool, threads)
    index = names.index_name(save_rank.rank, save_rank.world_size, save.attempt)
    vouched = write_index(place, index, shard, image, digests)
    receipt = Receipt(
        save_rank.rank, IncrementalShard(shard, image.length, vouched, []), image.length
    )
    return WriteResult(MetadataIndex(shard), image.length, _PinnedReceipt(receipt, pinned))


def _commit(
    save: _ActiveSave, metadata: Metadata, results: list[list[WriteResult]], receipts: list[Receipt]
) -> Snapshot:
    """Check what all ranks wrote against DCP's plan and what is seen here, and put the manifest."""
    place = save.location
    written = {r.index.fqn: r.storage_data for rank in results for r in rank}
    lacking = [fqn for fqn in metadata.state_dict_metadata if fqn not in written]
    if lacking:
        raise CommitError(
            f"Nothing was committed to {place.url}: no rank wrote {len(lacking)} planned leaves",
            expected=", ".join(lacking[:5]),
            todo="See what finish_plan of the planner leaves out",
            leaves=tuple(lacking),
        )
    parts = [
        [r.storage_data.holding for r in rank if isinstance(r.storage_data, _WrittenItem)]
        for rank in results
    ]
    plan = make_global_plan([make_local_plan(part) for part in parts])
    shards = check_receipts(place, receipts, len(results))
    version = names.parse_version(place.folder.rpartition("/")[2])
    root = _build_tree(metadata, [r.storage_data for rank in results for r in rank])
    statistics = {
        "bytes": sum(s.length for s in shards),
        "staged_seconds": 0.0,
        "written_seconds": round(time.perf_counter() - save.began, 6),
    }
    about = {
        **VersionMetadata().to_node()["dict"],
        METADATA_KEY: _encode_dcp_metadata(root, metadata),
        "statistics": {"dict": statistics},
    }
    manifest = Manifest(
        attempt=save.attempt,
        created=machine.utc_now(),
        writer=f"holdfast {__version__}",
        step=None if version is None else version.step,
        branch=0 if version is None else version.branch,
        parent=None,
        shards=shards,
        metadata={"dict": about},
        tree=root,
    )
    return put_manifest(place, manifest, plan)


def _build_tree(metadata: Metadata, written: Sequence[Any]) -> Any:
    """The tree of all that was written, in the order in which the state had it."""
    leaves = {}
    for w in written:
        if isinstance(w, _WrittenItem):
            h = w.holding
            leaves[w.path] = (
                {"blob": ["bytes", h.shape[0]]} if w.is_blob else {"tensor": [h.dtype, [*h.shape]]}
            )
    mapping = metadata.planner_data
    paths = [fqns.path_of(n, mapping) for n in mapping] if isinstance(mapping, dict) else []
    order = {path: leaves[path] for path in paths if path in leaves}
    return fqns.build_tree({**order, **leaves})


def _encode_dcp_metadata(root: Any, metadata: Metadata) -> Any:
    """What the tree does not tell of DCP's metadata. Raises ``Unsupported``."""
    note = {"save_id": metadata.storage_meta.save_id} if metadata.storage_meta else {}
    if metadata.planner_data != fqns.mapping_of(fqns.collect_entries(root, True)):
        note["planner_data"] = metadata.planner_data
    return tree.encode(note, "metadata/dcp", tree.reject_value)
