"""Every function and command that takes a snapshot takes ``RUN@latest``, ``@120``, ``@best``."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import limpet
from limpet.errors import LimpetError
from limpet.integrations.dcp import StorageReader
from tests.cli.invoke import run_cli

# the address, and the version
ADDRESSES = {
    "@latest": "version_3.1", "@1": "version_1", "@3": "version_3.1", "@3.0": "version_3",
    "@3.1": "version_3.1", "@best": "version_1", "@best:loss": "version_1",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make the run ``runs/a`` with versions 1, 2, 3 and, on branch 1, 3. The best is version 1."""
    monkeypatch.chdir(tmp_path)
    for at, losses in ((None, {1: 0.1, 2: 0.2, 3: 0.3}), (2, {3: 0.4})):
        state = {"x": torch.zeros(4)}
        keep = limpet.KeepLast(9) | limpet.KeepBest(1, "loss")
        options: dict[str, Any] = {"save": limpet.EverySteps(1), "keep": keep}
        with limpet.Checkpointer("runs/a", state, **options) as ckpt:
            ckpt.resume(at=at)
            for loss in losses.values():
                state["x"] += loss
                ckpt.step({"loss": loss})
    return tmp_path


def values(version):
    return limpet.load(f"runs/a/{version}")["x"]


def by_open(address):
    return limpet.open(address)["x"].read()


def by_load(address):
    return limpet.load(address)["x"]


def by_load_into(address):
    state = {"x": torch.zeros(4)}
    limpet.load(address, into=state)
    return state["x"]


def by_resume_start(address):
    state = {"x": torch.zeros(4)}
    with limpet.Checkpointer("runs/b", state, save=limpet.Never()) as ckpt:
        ckpt.resume(start=address)
    return state["x"]


def by_dcp(address):
    state = {"x": torch.zeros(4)}
    dcp.load(state, storage_reader=StorageReader(address), no_dist=True)
    return state["x"]


def by_export(address):
    to = Path(tempfile.mkdtemp(), "out.pt")
    limpet.export(address, to, to="torch")
    return torch.load(to, weights_only=True)["x"]


def by_path(address):
    return limpet.open(Path(address))["x"].read()


PYTHON = [by_open, by_load, by_load_into, by_resume_start, by_dcp, by_export, by_path]


@pytest.mark.parametrize("call", PYTHON)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.usefixtures("folder")
def test_every_function_takes_an_address(call):
    for address, version in ADDRESSES.items():
        assert torch.equal(call(f"runs/a{address}"), values(version))


COMMANDS: dict[str, list[str]] = {
    "show": ["ADDRESS"],
    "verify": ["ADDRESS"],
    "diff": ["ADDRESS", "runs/a/VERSION"],
    "copy": ["ADDRESS", "out/VERSION"],
    "reshard": ["ADDRESS", "out/VERSION", "--shards", "1"],
    "export": ["ADDRESS", "--to", "torch", "out/x.pt"],
}


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.usefixtures("folder")
def test_every_command_takes_an_address(verb):
    for address, version in ADDRESSES.items():
        words = [w.replace("ADDRESS", f"runs/a{address}") for w in COMMANDS[verb]]
        result = run_cli(verb, *[w.replace("VERSION", version) for w in words], "--json")
        assert (result.code, result.err) == (0, "")
        if verb in ("show", "export"):
            assert result.json["snapshot"].endswith(f"runs/a/{version}")
        if verb in ("copy", "reshard"):
            assert torch.equal(limpet.load(f"out/{version}")["x"], values(version))
        if verb == "export":
            assert torch.equal(torch.load("out/x.pt", weights_only=True)["x"], values(version))
        shutil.rmtree("out", ignore_errors=True)


@pytest.mark.usefixtures("folder")
def test_the_commands_that_take_a_step_take_what_follows_the_sign():
    for address, version in ADDRESSES.items():
        assert run_cli("pin", "runs/a", address[1:], "--json").json["version"] == version
        assert [str(v) for v in limpet.Run("runs/a").pins()] == [version]
        assert run_cli("pin", "runs/a", address[1:], "--remove").code == 0
        assert limpet.Run("runs/a").pins() == []


FORMS = ["runs/a@{}", "./runs/a@{}", "runs/a/version_{}", "{}/runs/a/version_{}/"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", ["1", "3.1"])
def test_the_commands_that_take_a_step_take_the_version_itself(folder, form, step):
    version = form.format(*([folder] * (form.count("{}") - 1)), step)
    assert run_cli("pin", version, "--json").json["version"] == f"version_{step}"
    assert [str(v) for v in limpet.Run("runs/a").pins()] == [f"version_{step}"]
    assert run_cli("pin", version, "--remove").out == f"version_{step} is no longer pinned\n"
    deleted = run_cli("rm", version, "--json")
    if step == "1":
        assert (deleted.code, deleted.json["deleted"]) == (0, ["version_1"])
    else:
        assert "version_3.1 of " in deleted.err
        assert "newest intact version" in deleted.err


@pytest.mark.parametrize("address", ["@latest", "@best", "@best:loss"])
def test_pin_takes_names_and_rm_does_not(folder, address):
    version = ADDRESSES[address]
    assert run_cli("pin", f"runs/a{address}", "--json").json["version"] == version
    for words in ([f"runs/a{address}"], ["runs/a", address[1:]]):
        result = run_cli("rm", *words)
        assert result.code == 2
        assert f"`limpet show runs/a{address}`, and write its step" in result.err
    assert len(limpet.Run("runs/a").listing().versions) == 4


def test_several_versions_of_one_run(folder, monkeypatch):
    monkeypatch.chdir(folder / "runs" / "a")
    result = run_cli("rm", ".", "1", "3.0", "2", "--json")
    assert result.json["deleted"] == ["version_1", "version_2", "version_3"]
    monkeypatch.chdir("version_3.1")
    assert run_cli("pin", ".").out == "version_3.1 is pinned\n"


def test_a_run_in_a_folder_with_the_name_of_a_version(folder):
    """The logger of Lightning numbers its folders so."""
    (folder / "logs").mkdir()
    (folder / "runs" / "a").rename(folder / "logs" / "version_5")
    assert run_cli("rm", "logs/version_5", 1).code == 0
    assert run_cli("rm", "logs/version_5@2").code == 0
    assert run_cli("rm", "logs/version_5/version_3").code == 0
    assert run_cli("rm", "logs/version_5").code == 2


@pytest.mark.usefixtures("folder")
def test_pin_takes_one_version():
    for words in (["runs/a", "1", "2"], ["runs/a@1", "runs/a@2"]):
        assert run_cli("pin", *words).code == 2
    assert limpet.Run("runs/a").pins() == []


NO_VERSION = [
    ("runs/a", 2, "is a run; name the version: cli VERB runs/a STEP, or cli VERB runs/a@STEP"),
    ("runs/b", 4, "no run at runs/b"),
    ("runs/b@1", 4, "no run at runs/b"),
    ("runs/a@1 runs/a@2", 2, "runs/a@1 is one version; for several, write runs/a STEP"),
    ("runs/a@1 2", 2, "runs/a@1 is one version; for several, write runs/a STEP"),
    ("runs/a runs/a@1", 2, "'runs/a@1' is not a step"),
    ("runs/a@1.1", 4, "no version_1.1 in runs/a. Found version_1"),
    ("runs/a@9", 4, "no version of step 9 on the current lineage"),
    ("runs/a/version_9", 4, "no version of step 9 on the lineage of branch 0"),
    ("runs/a/version_9.7", 4, "no branch 7"),
]


@pytest.mark.parametrize("verb", [["rm"], ["pin"], ["pin", "--remove"]])
@pytest.mark.usefixtures("folder")
def test_what_names_no_version(verb):
    for words, code, message in NO_VERSION:
        result = run_cli(*verb, *words.split())
        assert (result.code, result.err.count("\n")) == (code, 1), words
        assert message.replace("VERB", verb[0]) in result.err
    run = limpet.Run("runs/a")
    assert (len(run.listing().versions), run.pins()) == (4, [])


@pytest.mark.usefixtures("folder")
def test_the_methods_of_a_run_take_an_opened_address():
    run, best = limpet.Run("runs/a"), limpet.open("runs/a@best")
    assert run.metrics(best) == {"loss": 0.1}
    run.add_metrics(best, {"val": 1.0})
    run.evaluations(best)
    with pytest.raises(LimpetError, match="newest intact version"):
        run.delete(limpet.open("runs/a@latest"))
    assert run.delete(best) > 0
