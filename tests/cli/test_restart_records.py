"""The records of restarts in a run, which the commands leave alone."""

import re
import uuid

import pytest

from limpet.cli.resolve import _has_run_files
from limpet.format.names import restart_name
from limpet.run.run import Run
from limpet.storage.open import open_store
from limpet.tiers.restarts import Restart, write_restart
from tests.cli.invoke import run_cli

RECORD = Restart(0, 60, "version_60", "a" * 32, False, None, "2026-01-02T03:04:05+00:00")


def add_records(store):
    keys = [restart_name(0, f"{number:012x}") for number in range(20)]
    for key in keys[:-1]:
        write_restart(store, key, RECORD)
    store.put_if_absent(keys[-1], b"damaged")
    return keys


def restart_keys(store):
    return [s.key for s in store.list("") if s.key.startswith("restart-")]


@pytest.mark.parametrize(
    "command",
    [
        ["ls", "--json"], ["verify"], ["show"], ["sweep", "--grace", "0", "--abandoned"],
    ],
)  # fmt: skip
def test_commands_show_the_same_as_without_records(store, command):
    url = store.url if command[0] != "show" else f"{store.url}@latest"

    def run():
        found = run_cli(command[0], url, *command[1:])
        return found.code, re.sub(r"[0-9.]+ (m?s|[KMG]iB/s)", "TIME", found.out), found.err

    expected = run()
    keys = add_records(store)
    assert run() == expected
    assert restart_keys(store) == keys


def test_they_are_not_copied(store):
    """A copy of a run begins anew: it has not failed anywhere."""
    add_records(store)
    target = open_store(f"memory://{uuid.uuid4().hex}")
    assert run_cli("copy", store.url, target.url).code == 0
    assert restart_keys(target) == []
    assert Run(target).line() == Run(store).line()


def test_a_training_that_has_saved_nothing_yet_is_a_run():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    write_restart(store, restart_name(0, "0" * 12), RECORD)
    assert _has_run_files(store.url)
    assert run_cli("request-save", store.url, "--no-wait").code == 0
