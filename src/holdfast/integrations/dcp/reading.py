"""Loading through DCP: manifest and indexes as its metadata, its plan as reads."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast.engine.loading.targets import LoadTargets
from holdfast.engine.planning.read_plan import ReadRequest
from holdfast.engine.snapshot.location import Url
from holdfast.engine.snapshot.read import Target
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.errors import PlanError, ShapeMismatch
from holdfast.format import names
from holdfast.integrations.dcp import fqns
from holdfast.integrations.dcp.shared import (
    METADATA_KEY,
    completed_future,
    is_valid_url,
    to_checkpoint_id,
)
from holdfast.types import Box


class StorageReader(storage.StorageReader):
    """Loads the snapshot at ``url`` through DCP, whoever saved it::

        dcp.load(state, storage_reader=StorageReader("runs/a/version_100"))

    Every byte is checked before it is used. The leaf ``model/fc.weight`` is what DCP calls
    ``model.fc.weight``: ``state["model"]["fc.weight"]``. ``load_id``: a fresh name of the load.
    """

    def __init__(self, url: Url) -> None:
        super().__init__()
        self.url = url
        self.load_id = names.new_attempt()
        self._snapshot: Snapshot | None = None
        self._entries: dict[str, fqns.FqnEntry] = {}
        self._saved_by_dcp = False

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return to_checkpoint_id(self.url)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.url = checkpoint_id
        self.load_id = names.new_attempt()
        self._snapshot = None

    def read_metadata(self, *args: Any) -> Metadata:
        """DCP's description of the snapshot, made of its manifest and indexes."""
        snapshot = self._snapshot = open_snapshot(self.url)
        note = snapshot.metadata.get(METADATA_KEY)
        self._saved_by_dcp = note is not None
        told = note or {}
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
                properties = TensorProperties(dtype=getattr(torch, dtype))
                state[fqn] = TensorStorageMetadata(properties, torch.Size(shape), chunks[source])
        mapping = fqns.mapping_of(self._entries)
        return Metadata(
            state_dict_metadata=state,
            planner_data=told.get("planner_data", mapping),
            storage_data={fqn: entry.key for fqn, entry in self._entries.items()},
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id,
                save_id=told.get("save_id", snapshot.manifest.attempt),
                load_id=self.load_id,
            ),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._snapshot is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        snapshot = self._snapshot
        if snapshot is None:
            raise PlanError(
                "A StorageReader reads before a load has begun",
                todo="Give it to torch.distributed.checkpoint.load, which calls it in order",
            )
        room = LoadTargets(snapshot)
        filled, values = [], []
        for item in plan.items:
            entry = self._entries[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                values.append((item, room.add_fresh(entry.node, entry.key, "cpu")))
            else:
                filled.append((item, _add_target(item, entry, planner, room)))
        with snapshot.pin_while_reading():
            snapshot.read(room.requests, room.targets)
        for item, tensor in filled:
            planner.commit_tensor(item, tensor)
        for item, settle in values:
            planner.load_bytes(item, _to_bytes_io(settle(), self._saved_by_dcp))
        return completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_valid_url(checkpoint_id)


def _add_target(
    item: ReadItem, entry: fqns.FqnEntry, planner: LoadPlanner, targets: LoadTargets
) -> torch.Tensor:
    """Have what an item asks for read into the tensor that the planner gives for it."""
    tensor = planner.resolve_tensor(item).detach()
    sizes = tuple(item.lengths)
    if tuple(tensor.shape) != sizes:
        raise ShapeMismatch(
            f"The tensor that DCP's planner gives for {item.dest_index.fqn!r} does not fit",
            expected=list(sizes),
            found=list(tensor.shape),
            todo="See what resolve_tensor of the planner does",
            leaf=entry.key,
        )
    if 0 not in sizes:
        source = entry.node.get("tied", entry.key)
        chunk = item.storage_index.offset or (0,) * len(sizes)
        offsets = tuple(o + s for o, s in zip(chunk, item.storage_offsets, strict=True))
        targets.requests.append(ReadRequest(source, Box(offsets, sizes)))
        targets.targets.append(
            Target.from_tensor(targets.snapshot.leaves[source][0], sizes, tensor)
        )
    return tensor


def _to_bytes_io(value: Any, is_pickled: bool) -> io.BytesIO:
    """What DCP's planner unpickles: its own bytes, or what ``torch.save`` makes of a value."""
    if is_pickled:
        return io.BytesIO(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
