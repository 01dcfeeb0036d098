"""``limpet pin``."""

import pytest

from limpet.run.policy import KeepLast
from limpet.run.run import Run
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import flip_bit


def test_a_pin_protects_until_it_is_removed(store):
    result = run_cli("pin", store.url, 20)
    assert (result.code, result.out) == (0, "version_20 is pinned\n")
    assert run_cli("pin", store.url, 20).code == 0
    Run(store).retain(KeepLast(1))
    assert [v.step for v in Run(store).line()] == [20, 60]
    result = run_cli("pin", store.url, "20", "--remove")
    assert (result.code, result.out) == (0, "version_20 is no longer pinned\n")
    assert run_cli("pin", store.url, "20", "--remove").code == 4
    Run(store).retain(KeepLast(1))
    assert [v.step for v in Run(store).line()] == [60]


def test_json_keys_are_stable(run):
    report = run_cli("pin", run, 40, "--json").json
    assert report == {"run": run, "version": "version_40", "pinned": True}
    report = run_cli("pin", run, 40, "--remove", "--json").json
    assert report == {"run": run, "version": "version_40", "pinned": False}


def test_steps_of_branches(store):
    train_branch(store, start=40, last_step=60)
    assert run_cli("pin", store.url, 60).out == "version_60.1 is pinned\n"
    assert run_cli("pin", store.url, "60.0").out == "version_60 is pinned\n"
    assert run_cli("pin", store.url, "60.1", "--remove").out == "version_60.1 is no longer pinned\n"
    result = run_cli("pin", store.url, "60.7")
    assert result.code == 4
    assert "no branch 7" in result.err


@pytest.mark.parametrize("step", ["", "x", "1.", ".1", "-", "01", "1.2.3", "version_20", "20 "])
def test_an_invalid_step_is_a_usage_error(run, step):
    result = run_cli("pin", run, step)
    assert result.code == 2
    assert "120.1" in result.err


def test_ls_marks_pinned_versions(store):
    run_cli("pin", store.url, 20)
    run_cli("pin", store.url, 60)
    report = run_cli("ls", store.url, "--json").json
    assert [v["pinned"] for v in report["versions"]] == [True, False, True]
    lines = run_cli("ls", store.url).out.splitlines()
    assert "ok, pinned" in next(line for line in lines if line.startswith("  20"))
    assert "pinned" not in next(line for line in lines if line.startswith("  40"))
    assert "latest, pinned" in next(line for line in lines if line.startswith("  60"))
    flip_bit(store, "pin-version_20.json")
    assert run_cli("ls", store.url, "--json").json["versions"][0]["pinned"]
