"""``limpet import``."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import limpet as hf
from limpet.errors import NoSpace
from limpet.format.names import Version
from limpet.storage.open import open_store
from tests.cli.invoke import check_error_line, run_cli, train_branch
from tests.unreliable_stores import HookedStore


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with a checkpoint ``step_7.pt`` of a model and an epoch."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 2}, "step_7.pt")
    return tmp_path


def test_a_file_becomes_a_version(folder):
    result = run_cli("import", "step_7.pt", "runs/a")
    assert result.code == 0
    assert result.out.splitlines() == [
        "torch  step_7.pt",
        "runs/a/version_7  2 leaves, 4.03 KiB",
    ]
    model = nn.Linear(3, 2)
    into = {"model": model, "epoch": 0}
    assert len(hf.load("runs/a/version_7", into=into).loaded) == 3
    assert into["epoch"] == 2
    saved = torch.load("step_7.pt", weights_only=True)
    assert torch.equal(model.weight, saved["model"]["weight"])
    assert run_cli("verify", "runs/a").code == 0
    assert "import" in run_cli("show", "runs/a@latest").out


def test_a_bare_state_dict_is_imported_as_the_model(folder):
    torch.save(nn.Linear(3, 2).state_dict(), "w.pt")
    assert run_cli("import", "w.pt", "runs/a", "--step", 0).code == 0
    hf.load("runs/a/version_0", into={"model": nn.Linear(3, 2)})
    assert run_cli("import", "w.pt", "runs/a", "--step", 1, "--as", "net/a").code == 0
    hf.load("runs/a/version_1", into={"net/a": nn.Linear(3, 2)})


def test_json_keys_are_stable(folder):
    report = run_cli("import", "step_7.pt", "runs/a", "--json").json
    assert list(report) == [
        "from", "kind", "snapshot", "step", "leaves", "bytes", "mapped", "members", "renamed",
        "converted", "left_out", "seconds",
    ]  # fmt: skip
    snapshot = hf.open("runs/a/version_7")
    assert report["bytes"] == snapshot.nbytes
    del report["seconds"], report["bytes"]
    assert report == {
        "from": "step_7.pt", "kind": "torch", "snapshot": snapshot.url, "step": 7, "leaves": 2,
        "mapped": True, "members": {}, "renamed": [], "converted": [], "left_out": [],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_checkpoint(folder):
    state = {"weight": torch.ones(2, 3)}
    save_file(state, "m.safetensors")
    os.mkdir("checkpoint-20")
    save_file(state, "checkpoint-20/model.safetensors")
    dcp.save({"model": state}, checkpoint_id="dcp/step-30", no_dist=True)
    torch.save({"pytorch-lightning_version": "2", "global_step": 40, "state_dict": state}, "l.ckpt")
    for arguments, kind, step in (
        (("m.safetensors", "run", "--step", 10), "safetensors", 10),
        (("checkpoint-20", "run"), "huggingface", 20),
        (("dcp/step-30/", "run"), "dcp", 30),
        (("l.ckpt", "run"), "lightning", 40),
    ):
        report = run_cli("import", *arguments, "--json").json
        assert (report["kind"], report["step"]) == (kind, step)
        assert hf.load(f"run/version_{step}", keys="model/weight")
    assert [s.step for s in hf.Run("run").snapshots()] == [10, 20, 30, 40]


def test_changes_of_the_content_are_reported(folder):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    state = {f"module.{k}": v for k, v in model.state_dict().items()}
    torch.save(
        {"model": state, "optimizer": optimizer.state_dict()},
        "step_1.pt",
        _use_new_zipfile_serialization=False,
    )
    out = run_cli("import", "step_1.pt", "run").out
    assert "Removed wrapper prefixes from the names in model\n" in out
    assert "Keyed by parameter name: optimizer\n" in out
    assert "Read into memory as a whole" in out
    report = run_cli("import", "step_1.pt", "run", "--step", 2, "--keep-names", "--json").json
    assert (report["renamed"], report["mapped"]) == ([], False)
    assert list(hf.load("run/version_2")["model"]) == ["module.weight", "module.bias"]
    os.mkdir("hf_step_3")
    save_file({"w": torch.ones(1)}, "hf_step_3/model.safetensors")
    for i in range(7):
        Path(f"hf_step_3/{i}.bin").write_text("x")
    assert "Not imported: 0.bin, 1.bin, 2.bin, 3.bin, 4.bin ...\n" in run_cli(
        "import", "hf_step_3", "run"
    ).out  # fmt: skip


def test_a_checkpoint_without_a_step(folder):
    torch.save({"w": torch.ones(1)}, "w.pt")
    for options in ((), ("--json",)):
        result = run_cli("import", "w.pt", "runs/a", *options)
        assert result.code == 2
        assert "does not record its step: give --step N" in result.err
        assert result.out == ""
    for step in ("-1", "x", "1000000000000000000"):
        assert run_cli("import", "w.pt", "runs/a", "--step", step).code == 2
    assert not os.path.exists("runs")
    assert run_cli("import", "w.pt", "runs/a", "--step", 10**18 - 1).code == 0


def test_an_existing_version_is_not_changed(folder):
    hf.save("runs/a/version_7", {"x": np.arange(3)})
    check_error_line(
        run_cli("import", "step_7.pt", "runs/a"), 8, "already another snapshot at runs/a/version_7"
    )
    assert list(hf.load("runs/a/version_7")) == ["x"]


def test_the_version_joins_the_current_lineage(store, folder):
    train_branch(store, start=40, last_step=60)
    report = run_cli("import", "step_7.pt", store.url, "--step", 70, "--json").json
    assert report["snapshot"].endswith("version_70.1")
    newest = hf.Run(store.url).latest()
    assert newest.version == Version(70, 1)
    assert newest.metadata["reason"] == "import"


def test_the_destination_must_be_a_run(folder):
    hf.save("one", {"x": np.arange(3)})
    check_error_line(
        run_cli("import", "step_7.pt", "one"), 8, "location of a snapshot, not of a run"
    )
    check_error_line(run_cli("import", "step_7.pt", "runs/version_3"), 8, "not of a run")


def test_missing_files(folder):
    check_error_line(run_cli("import", "step_8.pt", "run"), 4, "nothing at step_8.pt")
    check_error_line(run_cli("import", "memory://b/x.pt", "run"), 4, "nothing at memory://b/x.pt")
    check_error_line(run_cli("import", "s3://b/x.pt", "run"), 5, "does not name a bucket")
    check_error_line(run_cli("import", "", "run"), 4)
    assert run_cli("import", "step_7.pt").code == 2


class RunsCommand:
    def __reduce__(self):
        return os.system, ("touch canary",)


def test_a_pickle_that_would_run_code_is_rejected(folder):
    torch.save({"w": RunsCommand()}, "step_9.pt")
    check_error_line(run_cli("import", "step_9.pt", "run"), 6, "refers to posix.system")
    result = run_cli("import", "step_9.pt", "run", "--json")
    assert result.json["exit"] == 6
    assert result.json["error"]["fields"]["classes"] == ["posix.system"]
    assert not os.path.exists("canary")
    assert not os.path.exists("run")
    assert "unpickle" not in run_cli("import", "--help").out  # and no option permits it


def test_a_file_without_read_permission(folder, monkeypatch):
    def deny(path, flags):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("limpet.convert.mmap_files.os.open", deny)
    check_error_line(run_cli("import", "step_7.pt", "run"), 5, "step_7.pt", "Permission denied")


def test_a_full_disk_leaves_no_version(folder, monkeypatch):
    store = HookedStore(open_store("memory://import-full"))

    def full(method, key):
        if method == "write_at":
            raise NoSpace("The disk is full")

    store.before = full
    monkeypatch.setattr("limpet.run.run.open_store", lambda url: store)
    check_error_line(run_cli("import", "step_7.pt", "memory://import-full"), 5, "The disk is full")
    assert not any("manifest" in s.key for s in store.list(""))


def test_import_without_torch(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    check_error_line(run_cli("import", "step_7.pt", "run"), 1, "needs PyTorch")
