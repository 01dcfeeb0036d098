"""An evaluation of a run in a store object: its workers use the same store, with its options."""

import pickle
import subprocess
import sys
from threading import Lock

import pytest

import limpet
from limpet.errors import LimpetError
from limpet.evaluation import Workers
from limpet.storage.memory import MemoryStore
from tests.evaluation import stores
from tests.evaluation.stores import SECRET, TokenStore
from tests.storage.fake_s3 import BUCKET, running_fake_s3

LISTENING = Workers(0, listen="tcp://127.0.0.1:0/0123456789abcdef")


def evaluation(run, workers, **options):
    functions = {"setup": stores.setup, "evaluate": stores.evaluate, "data": stores.data}
    return limpet.Evaluation(run, **functions, workers=workers, **options)


def check(run, workers, **options):
    (outcome,) = evaluation(run, workers, **options).run()
    assert outcome.metrics == {"n": 7.0, "shown": 0.0}, outcome.cause
    assert limpet.Run(run).metrics(1)["n"] == 7.0


def save_version(run):
    with limpet.Run(run).writer() as writer:
        writer.save({"n": 7}, step=1)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_store_of_the_user_is_used_with_its_options(tmp_path, workers):
    check(save_version(TokenStore(tmp_path, SECRET)), workers)


@pytest.mark.slow
def test_a_bucket_is_used_with_the_options_of_its_store(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    with running_fake_s3() as fake:
        keys = {"access_key_id": "key", "secret_access_key": SECRET}
        url = f"s3://{BUCKET}/a"
        store = limpet.open_store(url, endpoint=fake.endpoint, region="r", **keys)
        check(save_version(store.at("run")), 1)


def test_every_kind_of_store_can_be_sent(tmp_path):
    """Workers get it pickled. An S3 store is above."""
    url = f"fsspec+file://{tmp_path}"
    store = limpet.open_store(url, allow_weak=True, auto_mkdir=True).at("run")
    save_version(store)
    assert limpet.load(pickle.loads(pickle.dumps(store)).at("version_1")) == {"n": 7}
    for url in ("az://container/run", "gs://bucket/run", "hdfs://name:8020/run", str(tmp_path)):
        store = limpet.open_store(url)
        assert pickle.loads(pickle.dumps(store)).url == store.url


def test_a_store_in_memory_needs_no_worker_processes():
    store = save_version(MemoryStore())
    check(store, 0)
    check(save_version("memory://evaluated/run"), 0)
    for run in (store, "memory://evaluated/run"):
        for workers in (1, Workers(2), LISTENING):
            with pytest.raises(LimpetError, match=r"workers= must be 0, because memory://.* is in"):
                evaluation(run, workers)


def test_what_workers_cannot_use_is_refused_first(tmp_path):
    store = save_version(TokenStore(tmp_path, SECRET))
    for workers in (LISTENING, Workers(1, listen=LISTENING.listen), Workers(1, ray={})):
        with pytest.raises(LimpetError, match="run must be a URL, which workers on other") as e:
            evaluation(store, workers)
        assert SECRET not in str(e.value)
    evaluation(limpet.open_store(tmp_path), LISTENING)  # the URL says all of it
    store.connection = Lock()
    with pytest.raises(LimpetError, match=r"cannot be pickled \(TypeError: .*lock.*register_store"):
        evaluation(store, 1)
    check(store, 0)


SCRIPT = """
import sys
import limpet
from limpet.storage.local.store import LocalStore

class OwnStore(LocalStore):
    pass

try:
    limpet.Evaluation(OwnStore(sys.argv[1]), "m:f", "m:f", data="m:f", workers=1)
except limpet.errors.LimpetError as e:
    print(e)
"""


@pytest.mark.slow
def test_a_store_class_of_a_script_is_refused(tmp_path):
    """Workers import the module of a class; the module of a script has another name there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "run must be a store whose class is in a module, not in the script" in output
