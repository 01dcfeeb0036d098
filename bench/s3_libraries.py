"""The libraries that are compared on S3: how each saves a flat dict of tensors to a URL.

As in ``libraries``, each is used as its own documentation describes, with its default settings.
The environment variables of AWS name the server and the credentials. None of the others has a
commit, digests, or retention: each overwrites what is at its URL.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class S3Library:
    """``start_save`` returns the future of a save in the background, if the library has that."""

    name: str
    packages: tuple[str, ...]
    save: Callable[[State, str], object]
    load: Callable[[State, str], object]
    start_save: Callable[[State, str], Future[Any]] | None = None


def _limpet_save(state: State, url: str) -> None:
    import limpet

    limpet.save(url, state, step=1)


def _limpet_load(into: State, url: str) -> None:
    import limpet

    limpet.load(url, into=into)


def _dcp(
    name: str,
    packages: tuple[str, ...],
    writer: Callable[[str], dict[str, Any]],
    reader: Callable[[str], dict[str, Any]],
) -> S3Library:
    """``writer`` and ``reader`` return the arguments of DCP that name the storage."""

    def save(state: State, url: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, no_dist=True, **writer(url))

    def load(into: State, url: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(into, no_dist=True, **reader(url))

    def start_save(state: State, url: str) -> Future[Any]:
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(state, no_dist=True, **writer(url))

    return S3Library(name, packages, save, load, start_save)


def _fsspec(url: str) -> dict[str, Any]:
    return {"checkpoint_id": url}  # DCP chooses its reader or writer for fsspec


def _connector_writer(url: str) -> dict[str, Any]:
    from s3torchconnector.dcp import S3StorageWriter

    return {"storage_writer": S3StorageWriter(*_connector_place(url), _connector_config())}


def _connector_reader(url: str) -> dict[str, Any]:
    from s3torchconnector.dcp import S3StorageReader

    return {"storage_reader": S3StorageReader(*_connector_place(url), _connector_config())}


def _connector_place(url: str) -> tuple[str, str]:
    return "us-east-1", f"{url}/"


def _connector_config() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)  # a server on loopback has no name per bucket


def _orbax_save(state: State, url: str) -> None:
    import orbax.checkpoint as ocp
    from etils import epath

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(epath.Path(url), {key: value.numpy() for key, value in state.items()})
        checkpointer.wait_until_finished()


def _orbax_load(into: State, url: str) -> None:
    import orbax.checkpoint as ocp
    from etils import epath

    arrays = {key: value.numpy() for key, value in into.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(epath.Path(url), arrays)
    for key, value in into.items():
        value.copy_(torch.from_numpy(loaded[key]))


LIMPET = S3Library("limpet", ("boto3", "awscrt"), _limpet_save, _limpet_load)

OTHER_S3_LIBRARIES = (
    _dcp("DCP over s3fs", ("fsspec", "s3fs", "botocore"), _fsspec, _fsspec),
    _dcp("DCP over s3torchconnector", ("s3torchconnector",), _connector_writer, _connector_reader),
    S3Library("Orbax", ("orbax-checkpoint", "tensorstore"), _orbax_save, _orbax_load),
)

S3_LIBRARIES = {each.name: each for each in (LIMPET, *OTHER_S3_LIBRARIES)}
