"""A whole training and all commands with ``hdfs://``, and two processes that use one folder."""

import signal
import subprocess
import sys
import uuid

import numpy as np
import pytest

import holdfast
from holdfast.run.writer_lock import WriterLock
from holdfast.testing.contract import keys, partial_keys
from holdfast.types import MIB
from tests.cli.invoke import run_cli


@pytest.fixture
def run_url(hdfs):
    return f"{hdfs.url}/{uuid.uuid4().hex}"


def other_process(url):
    """Return a store that shares nothing with the others of this process."""
    return holdfast.open_store(url, timeout=299)


def test_a_file_that_another_process_has_replaced_is_read_anew(run_url):
    store, other = holdfast.open_store(run_url), other_process(run_url)
    store.put_if_absent("a", b"old")
    assert store.get("a", 9) == b"old"
    for data in (b"new", b"longer", b"-"):
        other.delete("a")
        other.put_if_absent("a", data)
        assert store.get("a", 9) == data


def test_a_training_that_was_replaced_notices_it_at_once(run_url):
    """The records of two trainings have the same length."""
    first, second = WriterLock(holdfast.open_store(run_url)), WriterLock(other_process(run_url))
    first.acquire()
    first.check(first._store)
    second._store.delete("writer.json")  # as if the two were on different machines
    second.acquire()
    with pytest.raises(holdfast.errors.HoldfastError, match="taken this run over"):
        first.check(first._store)


def state_of(step):
    frozen = np.arange(3 * MIB, dtype=np.int32)  # 12 MiB, which do not change
    w = np.full(2 * MIB, step, dtype=np.int32)
    return {"model": {"frozen": frozen, "w": w}, "step": step}


def train(store, steps):
    """Save each step until ``steps``, and return the step at which the training began."""
    state = state_of(0)
    with holdfast.Checkpointer(
        store, state, save=holdfast.EverySteps(1), keep=holdfast.KeepLast(2), incremental=True
    ) as run:
        run.resume()
        began = run.current_step
        assert np.array_equal(state["model"]["w"], state_of(began)["model"]["w"])
        while run.current_step < steps:
            state.update(state_of(run.current_step + 1))
            run.step()
    return began


def succeed(*arguments):
    result = run_cli(*arguments)
    assert result.code == 0, (arguments, result)
    return result


def steps_of(url):
    return [v["step"] for v in succeed("ls", url, "--json").json["versions"]]


KILLED = """
import os, sys
import numpy as np, holdfast
from holdfast.storage.sequential_upload import SequentialUpload
SequentialUpload.commit = lambda upload: os.kill(os.getpid(), 9)
holdfast.save(sys.argv[1], {"w": np.zeros(1 << 20)}, step=9)
"""


def test_a_training_and_every_command(run_url, tmp_path):
    url, backup = f"{run_url}/a", f"{run_url}/b"
    store = holdfast.open_store(url)
    assert train(store, 3) == 0
    succeed("pin", url, 3)
    assert train(store, 6) == 3  # another process would do this
    steps = steps_of(url)
    assert steps[-2:] == [5, 6], steps
    assert 2 not in steps  # nothing refers to it
    assert 3 in steps
    assert holdfast.load(f"{url}/version_6")["step"] == 6
    shards = [s.length for s in store.list("version_6") if s.key.endswith(".safetensors")]
    assert sum(shards) < 9 * MIB  # what changed
    succeed("show", f"{url}@latest")
    succeed("verify", url)
    assert run_cli("diff", f"{url}@5", f"{url}@6").code == 7

    killed = subprocess.run([sys.executable, "-c", KILLED, f"{url}/version_9"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(partial_keys(store)) == 1
    succeed("sweep", url, "--grace", "0")
    assert partial_keys(store) == []
    assert [k for k in keys(store) if "version_9/" in k or "pin-" in k] == ["pin-version_3.json"]
    assert steps_of(url) == steps

    local = str(tmp_path / "a")
    succeed("copy", url, local)
    succeed("copy", local, backup)
    for step in steps:
        succeed("diff", f"{url}@{step}", f"{backup}@{step}")
    succeed("verify", backup)

    succeed("reshard", f"{url}@6", f"{run_url}/c/version_6", "--shards", 3)
    succeed("export", f"{run_url}/c@6", "--to", "safetensors", f"{run_url}/out")
    succeed("import", f"{run_url}/out/model.safetensors", f"{run_url}/d", "--step", 6)
    assert np.array_equal(
        holdfast.load(f"{run_url}/d/version_6")["model"]["w"].numpy(), state_of(6)["model"]["w"]
    )

    succeed("pin", url, 3, "--remove")
    assert run_cli("request-save", url, "--timeout", "0.2").code == 10  # no training answers
    assert "request-save.json" not in keys(store)
    succeed("request-save", url, "--no-wait")
    assert "request-save.json" in keys(store)
    assert train(store, 8) == 6
    succeed("sweep", url, "--grace", "0")
    succeed("verify", url)
    assert steps_of(url)[-2:] == [7, 8]
    assert 3 not in steps_of(url)
