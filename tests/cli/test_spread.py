"""Every command on a run that spreads its shards."""

import uuid

import numpy as np
import pytest
from safetensors.numpy import load_file

import limpet
from limpet.cli.exit_codes import DIFFERS
from limpet.convert.copy import copy_snapshot
from limpet.format import names
from limpet.format.names import shard_name
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_snapshot
from limpet.storage.open import open_store
from limpet.testing.contract import keys, put
from tests.cli.invoke import run_cli
from tests.spread_stores import spread_over
from tests.trainings import initial_state, state_after, states_equal, train


@pytest.fixture(params=["memory", "local"])
def parent(request, tmp_path):
    """Return the URL of an empty folder."""
    return f"memory://{uuid.uuid4()}" if request.param == "memory" else str(tmp_path)


@pytest.fixture
def run(parent):
    """Return the URL of a run with the versions 1 and 2, spread over 16 folders."""
    return make_run(f"{parent}/spread", 16)


def make_run(url, prefixes):
    state, store = initial_state(), spread_over(open_store(url), prefixes or 0)
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        for step in (1, 2):
            train(state, ckpt, step)
            ckpt.wait()
    return url


def shard_folders(url):
    """Return the first levels of the keys of all shards of a run."""
    found = keys(open_store(url))
    return {key.partition("/")[0] for key in found if names.parse_attempt(key.rpartition("/")[2])}


def check_versions(url, spread):
    for step in (1, 2):
        state = initial_state()
        limpet.load(f"{url}/version_{step}", into=state)
        assert states_equal(state, state_after(step))
    assert {folder.startswith("spread-") for folder in shard_folders(url)} == {spread}
    assert run_cli("verify", url).code == 0


def test_commands_that_read(run, parent, tmp_path):
    listed = run_cli("ls", run, "--json").json
    assert [v["problem"] for v in listed["versions"]] == [None, None]
    assert listed["latest"] == "version_2"
    assert "orphan" not in run_cli("ls", run).out
    assert run_cli("show", f"{run}@2", "--layout").code == 0
    assert run_cli("verify", run).code == run_cli("verify", f"{run}/version_1").code == 0
    plain = make_run(f"{parent}/plain", None)
    assert run_cli("diff", f"{run}@2", f"{plain}@2").code == 0
    assert run_cli("diff", f"{run}@1", f"{run}@2").code == DIFFERS
    assert run_cli("export", f"{run}@2", tmp_path / "out", "--to", "safetensors").code == 0
    [file] = (tmp_path / "out").glob("*.safetensors")
    assert load_file(file)["weights"].tobytes() == state_after(2)["weights"].tobytes()


def test_a_copy_has_its_shards_where_its_destination_says(run, parent):
    assert run_cli("copy", run, f"{parent}/plain").code == 0
    check_versions(f"{parent}/plain", spread=False)
    again = run_cli("copy", run, f"{parent}/plain", "--json").json
    assert (len(again["copied"]), len(again["present"])) == (0, 2)
    assert run_cli("copy", f"{run}/version_2", f"{parent}/single/version_2").code == 0
    assert shard_folders(f"{parent}/single") == {"version_2"}
    other = spread_over(open_store(f"{parent}/other"), 3)
    for version in (1, 2):
        snapshot = open_snapshot(f"{run}/version_{version}")
        copy_snapshot(snapshot, Location(other, f"version_{version}"))
    check_versions(f"{parent}/other", spread=True)
    assert shard_folders(f"{parent}/other") <= {"spread-00", "spread-01", "spread-02"}
    again = run_cli("copy", run, f"{parent}/other", "--json").json
    assert (len(again["copied"]), len(again["present"])) == (0, 2)
    state = initial_state()
    with limpet.Checkpointer(f"{parent}/other", state, save=EverySteps(1)) as ckpt:
        ckpt.resume()
        train(state, ckpt, 3)
    assert run_cli("verify", f"{parent}/other").code == 0


def test_commands_that_write(run, parent, tmp_path):
    assert run_cli("reshard", f"{run}@2", f"{parent}/resharded/version_2", "--shards", 3).code == 0
    assert shard_folders(f"{parent}/resharded") == {"version_2"}
    assert run_cli("diff", f"{run}@2", f"{parent}/resharded@2").code == 0


def test_what_to_delete_or_move_is_named_by_its_place(run, parent):
    """The user does it with another tool."""
    shard = next(k for k in keys(Run(run).store) if names.is_shard_name(k.rpartition("/")[2]))
    copied = shard.partition("/")[2]
    put(open_store(f"{parent}/other"), copied, b"somebody's")
    assert f"{copied} already exists in" in run_cli("copy", run, f"{parent}/other").err

    state = {"frozen": np.arange(20_000.0), "p": limpet.Progress()}
    spread = spread_over(open_store(f"{parent}/base"), 16)
    with limpet.Checkpointer(spread, state, incremental=True) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.save()
    store = Run(f"{parent}/base").store
    [base] = {k for k in keys(store) if names.is_shard_name(k.rpartition("/")[2]) and "n_1/" in k}
    raw = bytearray(store.get(base, 1 << 20))
    raw[5000] ^= 1
    store.delete(base)
    put(store, base, bytes(raw))
    report = run_cli("verify", f"{parent}/base", "--json").json
    assert base in [p["file"] for version in report["versions"] for p in version["problems"]]


def test_sweep(run, parent):
    orphan = f"spread-0d/version_3/{shard_name(0, 1, '0c9d1e2f3a4b')}"
    put(Run(run).store, orphan, b"123")
    assert run_cli("ls", run, "--json").json["orphans"] != []
    assert orphan in run_cli("sweep", run, "--grace", "0s", "--dry-run").out
    assert run_cli("sweep", run, "--grace", "0s").code == 0
    assert orphan not in keys(Run(run).store)
    check_versions(run, spread=True)


def test_a_run_of_which_only_orphans_exist_is_swept(parent):
    """As after the first save of a training was killed in a store without folders."""
    run = Run(f"{parent}/run")
    orphan = f"spread-0e/version_1/{shard_name(0, 1, '0c9d1e2f3a4b')}"
    put(run.store, orphan, b"123")
    assert "has no version" in run_cli("ls", run.url).err
    assert run_cli("sweep", run.url, "--grace", "0s").code == 0
    assert keys(run.store) == []
