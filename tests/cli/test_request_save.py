"""``holdfast request-save``."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cli.verbs import request_save
from holdfast.errors import Denied
from holdfast.format.names import SAVE_REQUEST, Version
from holdfast.run.save_request import RequestedSave, put_request, read_request
from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from tests.cli.invoke import run_cli
from tests.cli.test_start import imported
from tests.run.test_save_request import Trainer

A = "aaaaaaaaaaaa"

_numbers = count()


@pytest.fixture
def store() -> MemoryStore:
    """A run of one version under a URL of its own."""
    made = open_store(f"memory://request-save-{next(_numbers)}")
    assert isinstance(made, MemoryStore)
    Trainer(made, step=60).save("cadence")
    return made


@pytest.fixture
def trainer(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has a training that makes a step, and answers, while the command sleeps."""
    monkeypatch.setattr(request_save, "sleep", Trainer(store, step=60).wait)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("the command waits")

    monkeypatch.setattr(request_save, "sleep", sleep)


def test_prints_the_version(store: MemoryStore, trainer: None) -> None:
    answer = run_cli("request-save", store.url)
    assert (answer.code, answer.out, answer.err) == (0, "version_61\n", "")
    assert read_request(store) is None


def test_json_keys_are_stable(store: MemoryStore, trainer: None) -> None:
    told = run_cli("request-save", store.url, "--json").json
    assert told == {"run": store.url, "version": "version_61", "joined": False}
    put_request(store, A)
    told = run_cli("request-save", store.url, "--json").json
    assert told == {"run": store.url, "version": "version_62", "joined": True}


def test_no_wait_only_asks(store: MemoryStore, never: None) -> None:
    answer = run_cli("request-save", store.url, "--no-wait")
    assert (answer.code, answer.out) == (0, "Requested a save at the next step\n")
    standing = read_request(store)
    assert standing is not None
    assert "request already exists" in run_cli("request-save", store.url, "--no-wait").out
    told = run_cli("request-save", store.url, "--no-wait", "--json").json
    assert told == {"run": store.url, "version": None, "joined": True}
    assert read_request(store) == standing


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_nobody_answers(store: MemoryStore, never: None, more: list[str]) -> None:
    answer = run_cli("request-save", store.url, "--timeout", "0", *more)
    assert answer.code == 10
    assert answer.err.count("\n") == 1
    parts = ("No training answered", store.url, "withdrawn", "training is running", "this folder")
    for part in parts:
        assert part in answer.err
    assert read_request(store) is None
    if more:
        assert answer.json["error"]["kind"] == "DeadlinePassed"


def test_a_plain_number_is_seconds(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def ask(run: object, timeout: float, *, wait: object) -> RequestedSave:
        given.append(timeout)
        return RequestedSave(Version(60), joined=False)

    monkeypatch.setattr(request_save, "request_and_wait", ask)
    for text in ("5", "1.5", "2m"):
        assert run_cli("request-save", store.url, "--timeout", text).code == 0
    assert given == [5.0, 1.5, 120.0]


def test_ctrl_c_takes_the_request_back(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        assert read_request(store) is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(request_save, "sleep", interrupt)
    answer = run_cli("request-save", store.url)
    assert answer.code == 130
    assert read_request(store) is None


def test_a_folder_that_cannot_be_written(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(self: object, key: str, data: bytes) -> None:
        raise Denied("The folder is read-only")

    monkeypatch.setattr(MemoryStore, "put_if_absent", deny)
    answer = run_cli("request-save", store.url)
    assert (answer.code, answer.err) == (5, "holdfast: The folder is read-only.\n")


def test_a_damaged_request_is_joined(store: MemoryStore, trainer: None) -> None:
    store.put_if_absent(SAVE_REQUEST, b"\0")
    assert run_cli("request-save", store.url).out == "version_61\n"
    assert read_request(store) is None


def test_in_a_folder(tmp_path: Path, never: None) -> None:
    hf.save(tmp_path / "run" / "version_1", {"x": np.arange(3)})
    assert run_cli("request-save", tmp_path / "run", "--no-wait").code == 0
    assert (tmp_path / "run" / SAVE_REQUEST).exists()
    assert run_cli("ls", tmp_path / "run").code == 0
    assert run_cli("verify", tmp_path / "run").code == 0
    assert run_cli("copy", tmp_path / "run", tmp_path / "to").code == 0
    assert not (tmp_path / "to" / SAVE_REQUEST).exists()


def test_an_empty_folder_may_be_that_of_a_training_that_has_not_saved_yet(tmp_path: Path) -> None:
    answer = run_cli("request-save", tmp_path, "--no-wait")
    assert (answer.code, answer.out) == (0, "Requested a save at the next step\n")


@pytest.mark.parametrize("place", ["none", "other", "run/version_1", "file"])
def test_what_is_no_run_is_not_written_to(tmp_path: Path, never: None, place: str) -> None:
    hf.save(tmp_path / "run" / "version_1", {"x": np.arange(3)})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("x")
    (tmp_path / "file").write_text("x")
    answer = run_cli("request-save", tmp_path / place)
    assert (answer.code, answer.err.count("\n")) == (4, 1)
    assert not list(tmp_path.rglob(SAVE_REQUEST))


@pytest.mark.parametrize("words", [["--timeout", "5x"], ["--timeout", "-5"], ["x", "y"], []])
def test_a_wrong_command_line(words: list[str]) -> None:
    assert run_cli("request-save", *(["x"] if len(words) == 2 else []), *words).code == 2


def test_json_needs_neither_torch_nor_rich(tmp_path: Path) -> None:
    hf.save(tmp_path / "version_1", {"x": np.arange(3)})
    assert not imported("request-save", str(tmp_path), "--no-wait", "--json") & {"torch", "rich"}
