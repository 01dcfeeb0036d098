"""``limpet request-save``."""

from itertools import count

import numpy as np
import pytest

import limpet as hf
from limpet.cli.verbs import request_save
from limpet.errors import Denied
from limpet.format.names import SAVE_REQUEST, Version
from limpet.run.save_request import RequestedSave, put_request, read_request
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli
from tests.run.test_save_request import Trainer

A = "aaaaaaaaaaaa"

_store_numbers = count()


@pytest.fixture
def store():
    """Return a run with one version under a unique URL."""
    store = open_store(f"memory://request-save-{next(_store_numbers)}")
    Trainer(store, step=60).save("cadence")
    return store


@pytest.fixture
def trainer(store, monkeypatch):
    """Make a training run a step, and answer, while the command sleeps."""
    monkeypatch.setattr(request_save, "sleep", Trainer(store, step=60).wait)


@pytest.fixture
def no_waiting(monkeypatch):
    def sleep(seconds):
        raise AssertionError("the command waits")

    monkeypatch.setattr(request_save, "sleep", sleep)


def test_the_command_prints_the_version(store, trainer):
    result = run_cli("request-save", store.url)
    assert (result.code, result.out, result.err) == (0, "version_61\n", "")
    assert read_request(store) is None


def test_json_keys_are_stable(store, trainer):
    report = run_cli("request-save", store.url, "--json").json
    assert report == {"run": store.url, "version": "version_61", "joined": False}
    put_request(store, A)
    report = run_cli("request-save", store.url, "--json").json
    assert report == {"run": store.url, "version": "version_62", "joined": True}


def test_no_wait_only_creates_the_request(store, no_waiting):
    result = run_cli("request-save", store.url, "--no-wait")
    assert (result.code, result.out) == (0, "Requested a save at the next step\n")
    existing = read_request(store)
    assert existing is not None
    assert "request already exists" in run_cli("request-save", store.url, "--no-wait").out
    report = run_cli("request-save", store.url, "--no-wait", "--json").json
    assert report == {"run": store.url, "version": None, "joined": True}
    assert read_request(store) == existing


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_timeout_withdraws_the_request(store, no_waiting, options):
    result = run_cli("request-save", store.url, "--timeout", "0", *options)
    assert result.code == 10
    assert result.err.count("\n") == 1
    parts = ("No training answered", store.url, "withdrawn", "training is running", "this folder")
    for part in parts:
        assert part in result.err
    assert read_request(store) is None
    if options:
        assert result.json["error"]["kind"] == "DeadlinePassed"


def test_a_plain_number_is_seconds(store, monkeypatch):
    timeouts: list[float] = []

    def record_timeout(run, timeout, *, wait):
        timeouts.append(timeout)
        return RequestedSave(Version(60), joined=False)

    monkeypatch.setattr(request_save, "request_and_wait", record_timeout)
    for text in ("5", "1.5", "2m"):
        assert run_cli("request-save", store.url, "--timeout", text).code == 0
    assert timeouts == [5.0, 1.5, 120.0]


def test_ctrl_c_withdraws_the_request(store, monkeypatch):
    def interrupt(seconds):
        assert read_request(store) is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(request_save, "sleep", interrupt)
    assert run_cli("request-save", store.url).code == 130
    assert read_request(store) is None


def test_a_folder_that_cannot_be_written(store, monkeypatch):
    def deny(self, key, data):
        raise Denied("The folder is read-only")

    monkeypatch.setattr(MemoryStore, "put_if_absent", deny)
    result = run_cli("request-save", store.url)
    assert (result.code, result.err) == (5, "limpet: The folder is read-only.\n")


def test_a_damaged_request_is_joined(store, trainer):
    store.put_if_absent(SAVE_REQUEST, b"\0")
    assert run_cli("request-save", store.url).out == "version_61\n"
    assert read_request(store) is None


def test_a_run_in_a_local_folder(tmp_path, no_waiting):
    hf.save(tmp_path / "run" / "version_1", {"x": np.arange(3)})
    assert run_cli("request-save", tmp_path / "run", "--no-wait").code == 0
    assert (tmp_path / "run" / SAVE_REQUEST).exists()
    assert run_cli("ls", tmp_path / "run").code == 0
    assert run_cli("verify", tmp_path / "run").code == 0
    assert run_cli("copy", tmp_path / "run", tmp_path / "to").code == 0
    assert not (tmp_path / "to" / SAVE_REQUEST).exists()


def test_a_training_without_a_version(tmp_path):
    with hf.Checkpointer(tmp_path, {"x": np.arange(3)}, save=hf.Never()) as ckpt:
        ckpt.step()
        result = run_cli("request-save", tmp_path, "--no-wait")
        assert (result.code, result.out) == (0, "Requested a save at the next step\n")


@pytest.mark.parametrize("location", ["none", "other", "run/version_1", "file"])
def test_nothing_is_written_to_other_locations(tmp_path, no_waiting, location):
    hf.save(tmp_path / "run" / "version_1", {"x": np.arange(3)})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("x")
    (tmp_path / "file").write_text("x")
    result = run_cli("request-save", tmp_path / location)
    assert (result.code, result.err.count("\n")) == (4, 1)
    assert not list(tmp_path.rglob(SAVE_REQUEST))


@pytest.mark.parametrize("arguments", [["--timeout", "5x"], ["--timeout", "-5"], ["x", "y"], []])
def test_invalid_arguments(arguments):
    assert run_cli("request-save", *(["x"] if len(arguments) == 2 else []), *arguments).code == 2
