"""The libraries that are measured: how each saves a flat dict of tensors and loads it in place.

Each library is used as its own documentation describes, with its default settings. If a default
does not work, or a faster setting is equally easy, the note in the row states the setting. If a
library returns new tensors, they are copied into the live tensors. ``durable`` means that the
library's own save returns only after the bytes are on disk. For the other libraries, the harness
adds an fsync of all files and folders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    package: str
    save: Callable[[State, Path], object]
    load: Callable[[State, Path], object]
    durable: bool = False
    save_note: str = ""
    load_note: str = ""


def _copy_into(loaded: State, into: State) -> None:
    for key, value in into.items():
        value.copy_(loaded[key])


def _limpet_save(state: State, folder: Path) -> None:
    import limpet

    limpet.save(str(folder), state, step=1)


def _limpet_load(into: State, folder: Path) -> None:
    import limpet

    limpet.load(str(folder), into=into)


def _torch_save(state: State, folder: Path) -> None:
    folder.mkdir()
    torch.save(state, folder / "state.pt")


def _torch_load(into: State, folder: Path) -> None:
    _copy_into(torch.load(folder / "state.pt", weights_only=True, mmap=True), into)


def _safetensors_save(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(state, str(folder / "state.safetensors"))


def _safetensors_load(into: State, folder: Path) -> None:
    from safetensors.torch import load_file

    _copy_into(load_file(str(folder / "state.safetensors")), into)


def _dcp_save(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def _dcp_save_threads(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(str(folder), thread_count=4)
    dcp.save(state, storage_writer=writer, no_dist=True)


def _dcp_load(into: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(into, checkpoint_id=str(folder), no_dist=True)


def _torchsnapshot_save(state: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(folder), {"state": StateDict(**state)})


def _torchsnapshot_load(into: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(folder)).restore({"state": StateDict(**into)})


def _torch_checkpointing() -> object:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # The default (direct I/O) fails with EINVAL on most file systems: the writes are not aligned.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(
        CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    )


def _torch_checkpointing_save(state: State, folder: Path) -> None:
    manager = _torch_checkpointing()
    manager.save(str(folder), {"state": state})  # type: ignore[attr-defined]
    manager.close()  # type: ignore[attr-defined]


def _torch_checkpointing_load(into: State, folder: Path) -> None:
    manager = _torch_checkpointing()
    manager.load(str(folder), into={"state": into})  # type: ignore[attr-defined]
    manager.close()  # type: ignore[attr-defined]


def _orbax_save(state: State, folder: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {key: value.numpy() for key, value in state.items()})
        checkpointer.wait_until_finished()


def _orbax_load(into: State, folder: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(folder, {key: value.numpy() for key, value in into.items()})
    _copy_into({key: torch.from_numpy(value) for key, value in loaded.items()}, into)


LIMPET = Library("limpet", "limpet", _limpet_save, _limpet_load, durable=True)

OTHER_LIBRARIES = (
    Library("torch.save", "torch", _torch_save, _torch_load, load_note="mmap=True"),
    Library("safetensors", "safetensors", _safetensors_save, _safetensors_load),
    Library("DCP", "torch", _dcp_save, _dcp_load),
    Library("DCP, 4 threads", "torch", _dcp_save_threads, _dcp_load, save_note="thread_count=4"),
    Library("torchsnapshot", "torchsnapshot", _torchsnapshot_save, _torchsnapshot_load),
    Library(
        "torch_checkpointing",
        "torch_checkpointing",
        _torch_checkpointing_save,
        _torch_checkpointing_load,
        save_note="synchronous; use_direct_io=False (default: EINVAL)",
    ),
    Library(
        "Orbax",
        "orbax-checkpoint",
        _orbax_save,
        _orbax_load,
        save_note="NumPy arrays",
        load_note="NumPy arrays",
    ),
)

LIBRARIES = {peer.name: peer for peer in (LIMPET, *OTHER_LIBRARIES)}
