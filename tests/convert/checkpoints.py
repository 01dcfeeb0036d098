"""Checkpoints of other libraries, valid and malicious, and short functions that import them."""

import os
import pickle
from contextlib import contextmanager
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import limpet
from limpet.convert.arrange import arrange_state
from limpet.convert.import_ import read_foreign_checkpoint, save_foreign_checkpoint
from limpet.snapshot.location import Location
from limpet.state.flatten import flatten
from limpet.storage.open import open_store

_run_numbers = count()


def import_checkpoint(path, under=None, step=1, **options):
    """Import a checkpoint. Return the snapshot."""
    read = read_foreign_checkpoint(str(path))
    state = arrange_state(read.value, under, **options).state
    location = Location(open_store(f"memory://imported{next(_run_numbers)}"), f"version_{step}")
    return save_foreign_checkpoint(location, flatten(state), read, step)


def import_and_load(path, under=None, **options):
    """Import a checkpoint. Return the loaded state."""
    return limpet.load(import_checkpoint(path, under, **options).url)


class MaliciousPickle:
    """An object whose pickle calls ``os.system`` to create a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def write_dcp_folder(folder, tensors, values=None, planner_data=None):
    """Write a DCP folder by hand.

    ``tensors``: name to (full shape, dtype, [(offsets, tensor)]); ``values``: name to bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensor_metadata, storage_data = {}, {}
    with open(folder / "__0_0.distcp", "wb") as out:
        for name, (shape, dtype, parts) in tensors.items():
            chunks = []
            for i, (offsets, tensor) in enumerate(parts):
                start = out.tell()
                torch.save(tensor, out)
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
                info = _StorageInfo("__0_0.distcp", start, out.tell() - start)
                storage_data[MetadataIndex(name, offsets, i)] = info
            tensor_metadata[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(shape), chunks
            )
        for name, data in (values or {}).items():
            tensor_metadata[name] = BytesStorageMetadata()
            storage_data[MetadataIndex(name)] = _StorageInfo("__0_0.distcp", out.tell(), len(data))
            out.write(data)
    metadata = Metadata(tensor_metadata, planner_data=planner_data, storage_data=storage_data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@contextmanager
def fake_process_group(rank, size):
    """Make this process rank ``rank`` of ``size``, in a group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_dcp_as_ranks(folder, size, make_state):
    """Write a DCP folder like ``size`` ranks. ``make_state(rank)`` returns the state of a rank.

    This process acts as one rank after another. The planners and writers are those of PyTorch.
    """
    writers, planners, plans = [], [], []
    for rank in range(size):
        with fake_process_group(rank, size):
            state = make_state(rank)
            writer, planner = FileSystemWriter(str(folder)), DefaultSavePlanner()
            planner.set_up_planner(state, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            writers.append(writer)
            planners.append(planner)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)
