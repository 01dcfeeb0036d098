"""Every function and command that takes a snapshot takes ``RUN@latest``, ``@120``, ``@best``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import HoldfastError
from holdfast.integrations.dcp.reading import StorageReader
from tests.cli.invoke import run_cli

# the address, and the version
ADDRESSES = {
    "@latest": "version_3.1",
    "@1": "version_1",
    "@3": "version_3.1",
    "@3.0": "version_3",
    "@3.1": "version_3.1",
    "@best": "version_1",
    "@best:loss": "version_1",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the run ``runs/a`` with versions 1, 2, 3 and, on branch 1, 3. The best is version 1."""
    monkeypatch.chdir(tmp_path)
    for at, losses in ((None, {1: 0.1, 2: 0.2, 3: 0.3}), (2, {3: 0.4})):
        state = {"x": torch.zeros(4)}
        keep = holdfast.KeepLast(9) | holdfast.KeepBest(1, "loss")
        options: dict[str, Any] = {"save": holdfast.EverySteps(1), "keep": keep}
        with holdfast.Checkpointer("runs/a", state, **options) as ckpt:
            ckpt.resume(at=at)
            for loss in losses.values():
                state["x"] += loss
                ckpt.step({"loss": loss})
    return tmp_path


def values(version: str) -> Any:
    return holdfast.load(f"runs/a/{version}")["x"]


def by_open(address: str) -> Any:
    return holdfast.open(address)["x"].read()


def by_load(address: str) -> Any:
    return holdfast.load(address)["x"]


def by_load_into(address: str) -> Any:
    state = {"x": torch.zeros(4)}
    holdfast.load(address, into=state)
    return state["x"]


def by_resume_start(address: str) -> Any:
    state = {"x": torch.zeros(4)}
    with holdfast.Checkpointer("runs/b", state, save=holdfast.Never()) as ckpt:
        ckpt.resume(start=address)
    return state["x"]


def by_dcp(address: str) -> Any:
    state = {"x": torch.zeros(4)}
    dcp.load(state, storage_reader=StorageReader(address), no_dist=True)
    return state["x"]


def by_export(address: str) -> Any:
    holdfast.export(address, "out.pt", to="torch")
    return torch.load("out.pt", weights_only=True)["x"]


def by_path(address: str) -> Any:
    return holdfast.open(Path(address))["x"].read()


PYTHON = [by_open, by_load, by_load_into, by_resume_start, by_dcp, by_export, by_path]


@pytest.mark.parametrize(("address", "version"), ADDRESSES.items())
@pytest.mark.parametrize("call", PYTHON)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.usefixtures("folder")
def test_every_function_takes_an_address(
    call: Callable[[str], Any], address: str, version: str
) -> None:
    assert torch.equal(call(f"runs/a{address}"), values(version))


COMMANDS: dict[str, list[str]] = {
    "show": ["ADDRESS"],
    "verify": ["ADDRESS"],
    "diff": ["ADDRESS", "runs/a/VERSION"],
    "copy": ["ADDRESS", "out/VERSION"],
    "reshard": ["ADDRESS", "out/VERSION", "--shards", "1"],
    "export": ["ADDRESS", "--to", "torch", "out.pt"],
}


@pytest.mark.parametrize(("address", "version"), ADDRESSES.items())
@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.usefixtures("folder")
def test_every_command_takes_an_address(verb: str, address: str, version: str) -> None:
    words = [w.replace("ADDRESS", f"runs/a{address}") for w in COMMANDS[verb]]
    result = run_cli(verb, *[w.replace("VERSION", version) for w in words], "--json")
    assert (result.code, result.err) == (0, "")
    if verb in ("show", "export"):
        assert result.json["snapshot"].endswith(f"runs/a/{version}")
    if verb in ("copy", "reshard"):
        assert torch.equal(holdfast.load(f"out/{version}")["x"], values(version))
    if verb == "export":
        assert torch.equal(torch.load("out.pt", weights_only=True)["x"], values(version))


@pytest.mark.parametrize(("address", "version"), ADDRESSES.items())
@pytest.mark.usefixtures("folder")
def test_the_commands_that_take_a_step_take_what_follows_the_sign(
    address: str, version: str
) -> None:
    pinned = run_cli("pin", "runs/a", address[1:], "--json")
    assert pinned.json["version"] == version
    assert [str(v) for v in holdfast.Run("runs/a").pins()] == [version]
    assert run_cli("pin", "runs/a", address[1:], "--remove").code == 0
    assert holdfast.Run("runs/a").pins() == []
    attested = run_cli("attest", "runs/a", address[1:], "--ok", "--by", "me", "--json")
    assert attested.json["versions"] == [version]


@pytest.mark.usefixtures("folder")
def test_the_methods_of_a_run_take_an_opened_address() -> None:
    run, best = holdfast.Run("runs/a"), holdfast.open("runs/a@best")
    assert run.metrics(best) == {"loss": 0.1}
    run.add_metrics(best, {"val": 1.0})
    run.evaluations(best)
    with pytest.raises(HoldfastError, match="newest intact version"):
        run.delete(holdfast.open("runs/a@latest"))
    assert run.delete(best) > 0
