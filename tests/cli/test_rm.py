"""``limpet rm`` and ``Run.delete``."""

import re

import pytest

from limpet.errors import LimpetError, NotFound
from limpet.format.names import Version
from limpet.run.lease import LeaseHolder
from limpet.run.run import Run
from tests.cli.invoke import run_cli, train_branch


def versions(store):
    return [str(v) for v in Run(store).listing().versions]


def test_versions_are_deleted_by_their_steps(run, store):
    nbytes = sum(s.length for s in store.list("") if s.key.startswith(("version_20", "version_40")))
    result = run_cli("rm", run, 20, 40, 20, "--json")
    assert result.code == 0
    assert result.json == {"run": run, "deleted": ["version_20", "version_40"], "bytes": nbytes}
    assert versions(store) == ["version_60"]


def test_the_text_names_what_was_deleted(run, store):
    result = run_cli("rm", run, 20)
    assert result.out.startswith("deleted version_20: ")
    assert (result.code, result.err) == (0, "")
    assert versions(store) == ["version_40", "version_60"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([20, 60], "version_60 .* not deleted: it is the newest intact version.*Nothing was"),
        ([20, 99], "no version of step 99"),
        ([40, 20], "version_40 of .* was not deleted: it is pinned"),
    ],
)
def test_all_versions_are_deleted_or_none(run, store, steps, message):
    Run(store).pin(40)
    result = run_cli("rm", run, *steps)
    assert result.code != 0
    assert re.search(message, result.err), result.err
    assert versions(store) == ["version_20", "version_40", "version_60"]


def test_branches(run, store):
    """The newest version of an abandoned branch is not the one that a training continues from."""
    train_branch(store, 20, 60)
    assert versions(store)[-2:] == ["version_60", "version_60.1"]
    assert run_cli("rm", run, "60.1").code != 0
    assert run_cli("rm", run, "60").code != 0  # the one of the current branch
    assert run_cli("rm", run, "60.0").code == 0
    assert versions(store) == ["version_20", "version_40", "version_40.1", "version_60.1"]


def test_what_a_resume_needs_is_kept(store):
    """As by retention: the newest intact version."""
    run = Run(store)
    with pytest.raises(LimpetError, match="newest intact version"):
        run.delete(60)
    run.delete(20)
    damaged = next(s.key for s in store.list("version_60") if s.key.endswith("safetensors"))
    store.delete(damaged)
    assert Run(store).delete(60) > 0  # damaged: no training continues from it
    with pytest.raises(LimpetError, match="newest intact version"):
        run.delete(40)
    assert versions(store) == ["version_40"]


def test_delete_accepts_steps_versions_and_snapshots(store):
    run = Run(store)
    assert run.delete(20, run.open(Version(40))) > 0
    assert versions(store) == ["version_60"]
    with pytest.raises(NotFound):
        run.delete(Version(20))
    assert run.delete() == 0


def test_a_version_in_use_by_an_evaluation_is_kept(run, store):
    holder = LeaseHolder(store, "val", seconds=2.0)
    holder.acquire()
    holder.start()
    holder.protect([Version(20)])
    result = run_cli("rm", run, 20, 40)
    assert "the evaluation val is using it" in result.err
    assert versions(store) == ["version_20", "version_40", "version_60"]
    holder.release()
    assert run_cli("rm", run, 20, 40).code == 0
