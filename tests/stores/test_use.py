"""A whole training and every command with ``s3://``, ``hdfs://``, and ``az://``."""

import signal
import subprocess
import sys
import uuid

import numpy as np
import pytest

import limpet
from limpet.cli import VERBS
from limpet.testing.contract import keys, partial_keys
from limpet.types import MIB
from tests.cli.invoke import run_cli


@pytest.fixture(params=["s3", "hdfs", "az"])
def server_url(request):
    server = request.getfixturevalue(request.param)
    return f"{server.url}/{uuid.uuid4().hex}" if request.param == "hdfs" else f"{server}/runs"


class Commands:
    """Run commands, and collect the verbs that succeeded."""

    def __init__(self):
        self.verbs = set()

    def succeed(self, verb, *arguments):
        result = run_cli(verb, *arguments)
        assert result.code == 0, (verb, arguments, result)
        self.verbs.add(verb)
        return result

    def steps_of(self, url):
        return [v["step"] for v in self.succeed("ls", url, "--json").json["versions"]]


def state_of(step):
    frozen = np.arange(3 * MIB, dtype=np.int32)  # 12 MiB, which do not change
    w = np.full(2 * MIB, step, dtype=np.int32)
    return {"model": {"frozen": frozen, "w": w}, "step": step}


def train(store, steps):
    """Save each step until ``steps``, and return the step at which the training began."""
    state = state_of(0)
    with limpet.Checkpointer(
        store, state, save=limpet.EverySteps(1), keep=limpet.KeepLast(2), incremental=True
    ) as run:
        run.resume()
        began = run.current_step
        assert np.array_equal(state["model"]["w"], state_of(began)["model"]["w"])
        while run.current_step < steps:
            state.update(state_of(run.current_step + 1))
            run.step()
    return began


def check_values(url, step):
    model = limpet.load(url)["model"]
    assert model.keys() == state_of(step)["model"].keys()
    for name, value in state_of(step)["model"].items():
        assert np.array_equal(np.asarray(model[name]), value), name


KILLED = """
import os, sys
import numpy as np, limpet
from limpet.storage.uploads import PartUpload, SequentialUpload
for kind in PartUpload, SequentialUpload:  # HDFS also writes a pin as such an upload
    def commit(upload, commit=kind.commit):
        return os.kill(os.getpid(), 9) if upload._key.endswith(".safetensors") else commit(upload)
    kind.commit = commit
limpet.save(sys.argv[1], {"w": np.zeros(5 << 20)}, step=9)
"""


def test_a_training_and_every_command(server_url, tmp_path):
    url, backup = f"{server_url}/a", f"{server_url}/b"
    store = limpet.open_store(url)
    commands = Commands()
    succeed, steps_of = commands.succeed, commands.steps_of
    assert train(store, 3) == 0
    succeed("pin", url, 3)
    assert train(store, 6) == 3  # another process would do this
    steps = steps_of(url)
    assert steps[-2:] == [5, 6], steps
    assert 2 not in steps  # nothing refers to it
    assert 3 in steps
    check_values(f"{url}/version_6", 6)
    shards = [s.length for s in store.list("version_6") if s.key.endswith(".safetensors")]
    assert sum(shards) < 9 * MIB  # what changed
    succeed("show", f"{url}@latest")
    succeed("verify", url)
    assert run_cli("diff", f"{url}@5", f"{url}@6").code == 7

    killed = subprocess.run([sys.executable, "-c", KILLED, f"{url}/version_9"], check=False)
    assert killed.returncode == -signal.SIGKILL
    hidden = store.traits.hidden_uploads
    assert len(partial_keys(store)) == (0 if hidden else 1)
    swept = succeed("sweep", url, "--grace", "0")
    assert (f"Unfinished uploads cannot be listed here: {hidden}" in swept.out) == bool(hidden)
    assert partial_keys(store) == []
    assert [k for k in keys(store) if "version_9/" in k or "pin-" in k] == ["pin-version_3.json"]
    assert steps_of(url) == steps

    local = str(tmp_path / "a")
    succeed("copy", url, local)
    succeed("copy", local, backup)
    for step in steps:
        succeed("diff", f"{url}@{step}", f"{backup}@{step}")
    succeed("verify", backup)
    own = "--with", "tests.evaluation.trivial", "--data", "tests.evaluation.trivial:data"
    succeed("evaluate", backup, *own, "--workers", 1)
    newest = limpet.Run(backup).latest()
    assert limpet.Run(backup).metrics(newest)["leaves"] == len(newest.keys())
    assert [k for k in keys(limpet.open_store(backup)) if k.startswith("lease-")] == []
    for step in (1, 2):
        limpet.save(f"{server_url}/d/version_{step}", {"n": step}, step=step)
    succeed("rm", f"{server_url}/d", 1)
    assert steps_of(f"{server_url}/d") == [2]

    succeed("reshard", f"{url}@6", f"{server_url}/c/version_6", "--shards", 3)
    check_values(f"{server_url}/c/version_6", 6)
    for kind, name in (("safetensors", "model.safetensors"), ("torch", "weights.pt"), ("hf", "")):
        target = f"{server_url}/{kind}/{name}".rstrip("/")
        succeed("export", f"{server_url}/c@6", "--to", kind, "--root", "model", target)
        succeed("import", target, f"{server_url}/from-{kind}", "--step", 6)
        check_values(f"{server_url}/from-{kind}/version_6", 6)

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
    succeed("ls", server_url)  # several runs
    succeed("report", url)
    succeed("metrics", url)
    succeed("best", server_url, "--metric", "leaves", "--mode", "max")
    assert commands.verbs == {*VERBS} - {"run", "ui"}


TRAINING = """
import sys, time, limpet
with limpet.Checkpointer(sys.argv[1], {"n": 1}, save=limpet.EverySteps(10**9), at_end=False) as run:
    run.resume()
    while not run.run.listing().versions:
        run.step()
        time.sleep(0.1)
        print(flush=True)
"""


@pytest.mark.slow
def test_the_first_save_of_a_training_can_be_requested(server_url):
    """The training has written nothing but its lock."""
    url = f"{server_url}/first"
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, url], stdout=subprocess.PIPE
    ) as training:
        try:
            training.stdout.readline()
            assert keys(limpet.open_store(url)) == ["writer.json"]
            result = run_cli("request-save", url, "--timeout", "60")
            assert result.code == 0, result
            [snapshot] = limpet.Run(url).snapshots()
            assert str(snapshot.version) == result.out.strip()
            assert training.wait(60) == 0
        finally:
            training.kill()


def test_a_wrong_url_says_what_is_there(server_url):
    url = f"{server_url}/runs/a"
    limpet.save(f"{url}/version_3", {"n": 1}, step=3)
    bucket = server_url.rpartition("/")[0]
    for verb in ("ls", "verify", "show"):
        for wrong, found in (
            (f"{server_url}/runs", "found a folder with a"),
            (f"{url}/version_3/manifest.json", "Check the path."),
            (f"{url}b", "found nothing"),
            (bucket, f"found a folder with {server_url.rpartition('/')[2]}"),
            (f"{server_url}/none/x", "found nothing"),
        ):
            result = run_cli(verb, wrong)
            if verb == "ls" and wrong == f"{server_url}/runs":  # it lists the runs
                assert result.code == 0
                continue
            assert result.code == 4
            assert result.err.startswith(f"limpet: There is no {'snapshot' * (verb == 'show')}")
            if not (wrong == bucket and server_url.startswith("hdfs")):  # those of other tests
                assert found in result.err
    assert run_cli("copy", f"{url}@3", f"{server_url}/single").code == 0
    assert f"limpet show {server_url}/single" in run_cli("ls", f"{server_url}/single").err
