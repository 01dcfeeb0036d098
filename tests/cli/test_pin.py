"""``holdfast pin``."""

from __future__ import annotations

import pytest

from holdfast.format.names import Version
from holdfast.run.policy import KeepLast
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import flip_bit


def test_pins_until_it_is_removed(store: MemoryStore) -> None:
    answer = run_cli("pin", store.url, 20)
    assert (answer.code, answer.out) == (0, "version_20 is pinned\n")
    assert run_cli("pin", store.url, 20).code == 0
    Run(store).retain(KeepLast(1))
    assert [v.step for v in Run(store).line()] == [20, 60]
    answer = run_cli("pin", store.url, "20", "--remove")
    assert (answer.code, answer.out) == (0, "version_20 is no longer pinned\n")
    assert run_cli("pin", store.url, "20", "--remove").code == 4
    Run(store).retain(KeepLast(1))
    assert [v.step for v in Run(store).line()] == [60]


def test_json_keys_are_stable(run: str) -> None:
    told = run_cli("pin", run, 40, "--json").json
    assert told == {"run": run, "version": "version_40", "pinned": True}
    told = run_cli("pin", run, 40, "--remove", "--json").json
    assert told == {"run": run, "version": "version_40", "pinned": False}


def test_steps_of_branches(store: MemoryStore) -> None:
    train_branch(store, start=40, last_step=60)
    assert run_cli("pin", store.url, 60).out == "version_60.1 is pinned\n"
    assert run_cli("pin", store.url, "60.0").out == "version_60 is pinned\n"
    assert run_cli("pin", store.url, "60.1", "--remove").out == "version_60.1 is no longer pinned\n"
    answer = run_cli("pin", store.url, "60.7")
    assert answer.code == 4
    assert "no branch 7" in answer.err


def test_to_remove_a_pin_twice_takes_none_of_another_branch(store: MemoryStore) -> None:
    run_cli("pin", store.url, 60)
    train_branch(store, start=40, last_step=60)
    run_cli("pin", store.url, 60)
    assert run_cli("pin", store.url, 60, "--remove").out == "version_60.1 is no longer pinned\n"
    answer = run_cli("pin", store.url, 60, "--remove")
    assert answer.code == 4
    assert "version_60.1" in answer.err
    assert Run(store).pins() == [Version(60)]


def test_a_step_that_is_not_there_is_told_with_those_that_are(run: str) -> None:
    answer = run_cli("pin", run, 50)
    assert answer.code == 4
    assert "no version of step 50" in answer.err
    assert "version_40" in answer.err
    assert run_cli("pin", run, 50, "--json").json["error"]["kind"] == "NotFound"


@pytest.mark.parametrize("step", ["", "x", "1.", ".1", "-", "01", "1.2.3", "version_20", "20 "])
def test_what_is_no_step_is_a_usage_error(run: str, step: str) -> None:
    answer = run_cli("pin", run, step)
    assert answer.code == 2
    assert "120.1" in answer.err


def test_a_place_that_is_no_run(elsewhere: str, run: str) -> None:
    assert run_cli("pin", elsewhere, 20).code == 4
    assert run_cli("pin", f"{run}/version_20", 20).code == 4


def test_ls_marks_what_is_pinned(store: MemoryStore) -> None:
    run_cli("pin", store.url, 20)
    run_cli("pin", store.url, 60)
    told = run_cli("ls", store.url, "--json").json
    assert [v["pinned"] for v in told["versions"]] == [True, False, True]
    lines = run_cli("ls", store.url).out.splitlines()
    assert "ok, pinned" in next(line for line in lines if line.startswith("  20"))
    assert "pinned" not in next(line for line in lines if line.startswith("  40"))
    assert "latest, pinned" in next(line for line in lines if line.startswith("  60"))
    flip_bit(store, "pin-version_20.json")
    assert run_cli("ls", store.url, "--json").json["versions"][0]["pinned"]
