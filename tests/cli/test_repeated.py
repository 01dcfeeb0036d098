"""A command that was killed is repeated: it completes what it began, or finds it done."""

import pytest

import limpet
from limpet.errors import StoreError
from limpet.format.names import Version
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore, _MemoryUpload
from tests.cli.invoke import run_cli, train_branch

METHODS = ("put", "put_if_absent", "stat", "get", "get_range", "list", "list_level", "delete")


class Killed(StoreError):
    """The process has ended: this and every later call of a store has no effect."""


@pytest.fixture
def kill_at(monkeypatch):
    """Kill at a call of any store in memory, before or after its effect; 0: not. Returns the
    calls that were made since."""
    calls, end = [0], [0, False]

    def step(after):
        if end[0] and calls[0] >= end[0] and (after == end[1] or calls[0] > end[0]):
            calls[0] = end[0] + 1
            raise Killed("killed")

    def wrap(owner, name):
        inner = getattr(owner, name)

        def call(*arguments, **options):
            calls[0] += 1
            step(after=False)
            found = inner(*arguments, **options)
            step(after=True)
            return found

        monkeypatch.setattr(owner, name, call)

    for name in METHODS:
        wrap(MemoryStore, name)
    for name in ("write_at", "commit"):
        wrap(_MemoryUpload, name)

    def kill(at, after=False):
        made, calls[0] = calls[0], 0
        end[:] = at, after
        return made

    return kill


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")


COMMANDS = {
    "copy a whole run": ("copy", "{run}", "{to}"),
    "copy a snapshot": ("copy", "{run}/version_40", "{to}/version_40"),
    "copy an incremental snapshot": ("copy", "{run}/version_80.1", "{to}/x"),
    "reshard": ("reshard", "{run}/version_40", "{to}/version_40", "--shards", "2"),
    "reshard to a run": ("reshard", "{run}/version_40", "{to}", "--shards", "3"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if "whole" in n else ()) for n in COMMANDS]
)
def test_a_command_that_is_repeated_after_a_kill_at_any_call(name, store, kill_at):
    train_branch(store, start=40, last_step=80)
    run = Run(store)
    run.pin(40, branch=0)
    run.add_metrics(run.find(40), {"m": 1.0})
    if "whole" in name:  # three versions on two branches: each call is one run of the command
        run.delete(Version(20), Version(60))
    document, number = None, 0
    for after in (False, True):
        at = 1
        while True:
            to = f"{store.url}-to-{after}-{at}"
            if name == "reshard to a run":
                limpet.save(f"{to}/version_7", {"n": 1})
            command = [part.format(run=store.url, to=to) for part in COMMANDS[name]]
            kill_at(at, after)
            killed = run_cli(*command)
            made = kill_at(0)
            repeated = run_cli(*command, "--json")  # the last time, everything is there
            assert repeated.code == 0, (at, after, repeated)
            found = sorted(s.url.removeprefix(to) for s in Run(to).snapshots())
            document = document or found
            assert found == document
            assert run_cli("verify", command[2]).code == 0
            number += 1
            if killed.code == 0 and made < at:
                break
            at += 1
    assert number > 40


def test_other_content_is_still_refused(store):
    to = f"{store.url}-other"
    reshard = ("reshard", f"{store.url}/version_40", f"{to}/version_40", "--shards")
    assert run_cli(*reshard, 2).code == 0
    for other in ((*reshard, 3), (*reshard, 2, "--split", "none"), ("copy", *reshard[1:3])):
        result = run_cli(*other)
        assert result.code == 8, other
        assert "nothing was changed" in result.err
