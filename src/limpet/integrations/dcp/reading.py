"""Load through DCP: convert manifest and indexes to DCP's metadata, and its plan to reads."""

from __future__ import annotations

import io
import os
from dataclasses import replace
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

from limpet.errors import LimpetError, NoSnapshot, NotFound, PlanError, ShapeMismatch
from limpet.format import names
from limpet.integrations.dcp import fqns
from limpet.integrations.dcp.shared import (
    METADATA_KEY,
    SnapshotStorage,
    completed_future,
    rank_location,
)
from limpet.layout.read_plan import ReadRequest
from limpet.loading.targets import LoadTargets
from limpet.run.address import open_reader
from limpet.snapshot.location import Url
from limpet.snapshot.read import Target
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.types import Box


class StorageReader(SnapshotStorage, storage.StorageReader):
    """Load the snapshot at ``url`` through DCP, whether DCP or Limpet saved it::

        dcp.load(state, storage_reader=StorageReader("runs/a/version_100"))

    Every byte is checked before it is used. The leaf ``model/fc.weight`` has the FQN
    ``model.fc.weight`` in DCP and is loaded into ``state["model"]["fc.weight"]``. ``load_id`` is a
    unique name of the load. If ``url`` has no snapshot of all ranks, each rank loads its own, which
    a save with ``use_collectives=False`` has left.
    """

    def __init__(self, url: Url) -> None:
        super().__init__()
        self.url = url
        self.load_id = names.random_id()
        self._snapshot: SnapshotReader | None = None
        self._entries: dict[str, fqns.FqnEntry] = {}
        self._saved_by_dcp = False
        self._is_of_rank = False
        self._error: LimpetError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.url = checkpoint_id
        self.load_id = names.random_id()
        self._snapshot = None

    def read_metadata(self, *args: Any, rank: int | None = None, **kwargs: Any) -> Metadata:
        """Return DCP's metadata for the snapshot, created from its manifest and indexes.

        If this fails, DCP calls it again with the ``rank`` whose own snapshot may be there. A
        snapshot of all ranks that exists and cannot be read raises its error again.
        """
        snapshot = self._snapshot = self._open(rank)
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

    def _open(self, rank: int | None) -> SnapshotReader:
        self._is_of_rank = rank is not None
        if rank is not None:
            if self._error is not None and not isinstance(self._error, NotFound | NoSnapshot):
                raise self._error
            return open_location(rank_location(self.url, rank))
        self._error = None
        try:
            return open_reader(self.url)
        except LimpetError as e:
            self._error = e
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._snapshot is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if self._snapshot is None or self._is_of_rank:
            return replace(plan, storage_data=None)
        return replace(plan, storage_data=self._snapshot.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``PlanError`` if the ranks have found different versions at an address."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise PlanError(
                f"The ranks have opened different versions at {self.checkpoint_id}",
                expected="one version",
                found="another one on some ranks, because the run has changed meanwhile",
                todo="Name the version by its step, such as RUN@120",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        snapshot = self._snapshot
        if snapshot is None:
            raise PlanError(
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

    Raises ``ShapeMismatch`` if the tensor has another shape than the item.
    """
    tensor = planner.resolve_tensor(item).detach()
    sizes = tuple(item.lengths)
    if tuple(tensor.shape) != sizes:
        raise ShapeMismatch(
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
        targets.requests.append(ReadRequest(source, Box(offsets, sizes)))
        targets.targets.append(
            Target.from_tensor(targets.snapshot.leaves[source][0], sizes, tensor)
        )
    return tensor


def _to_bytes_io(value: Any, is_pickled: bool) -> io.BytesIO:
    """Return what DCP's planner unpickles: DCP's own bytes, or a ``torch.save`` of the value."""
    if is_pickled:
        return io.BytesIO(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
