"""What people get wrong with ``az://``, on Azurite."""

import os
import uuid

import numpy as np
import pytest

import limpet
from limpet.errors import StoreError
from limpet.testing.contract import keys
from limpet.types import MIB
from tests.cli.invoke import run_cli
from tests.stores.checks import check_a_missing_bucket_is_not_an_empty_run, check_message

COMMANDS = ["ls", "verify", "show", "sweep"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_container(az, command):
    check_message(run_cli(command, "az://no-such-container/run"), "There is no az://", "Create it")


def test_a_missing_container_is_not_an_empty_run(az):
    url = f"az://no-{uuid.uuid4()}/run"
    store, message = limpet.open_store(url), r"There is no az://no-.*Create it"
    calls = (lambda: store.stat("a"), lambda: store.delete("a"))
    check_a_missing_bucket_is_not_an_empty_run(url, message, *calls)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_folder(az, command):
    limpet.save(f"{az}/run/version_1", {"n": 1}, step=1)
    check_message(run_cli(command, f"{az}/runx"), "There is no", f"{az}/runx")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_key(az, monkeypatch, command):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmcta2V5")
    result = run_cli(command, f"{az}/run")
    check_message(result, "403", "AuthorizationFailure", "Check the account and its key")
    assert "d3Jvbmcta2V5" not in result.err


def test_a_wrong_sas_token_is_not_shown(az, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2021-08-06&sig=SECRETSIG%3D")
    with pytest.raises(limpet.errors.Denied) as caught:
        limpet.load(f"{az}/run/version_1")
    assert "SECRETSIG" not in str(caught.value) + repr(caught.value.fields)


def test_missing_credentials(az, monkeypatch):
    """There is no account, and no metadata service at the address that is asked for a token."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:9/token")
    check_message(run_cli("ls", f"{az}/run"), "there are no credentials", "AZURE_CLIENT_SECRET")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    check_message(run_cli("ls", f"{az}/run"), "Account must be specified", "_ACCOUNT_NAME")


def test_credentials_that_are_set_later_are_found(az, monkeypatch):
    """A notebook: the first cell fails, the second sets the variable, the first is run again."""
    limpet.save(f"{az}/run/version_1", {"n": 1}, step=1)
    key = os.environ["AZURE_STORAGE_ACCOUNT_KEY"]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmcta2V5")
    store = limpet.open_store(f"{az}/run")
    with pytest.raises(limpet.errors.Denied):
        limpet.load(store.at("version_1"))
    assert not store.remote.server._clients  # a client keeps credentials, and that a file had none
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    assert limpet.load(store.at("version_1")) == {"n": 1}


@pytest.mark.parametrize("path", ["", "/devstoreaccount1"])
def test_nobody_listens_at_the_endpoint(az, path):
    store = limpet.open_store(f"{az}/run", timeout=1, endpoint=f"http://127.0.0.1:9{path}")
    for call in (
        lambda: limpet.Run(store).latest(),
        lambda: limpet.save(store.at("version_1"), {"n": np.zeros(20 * MIB, np.uint8)}),
    ):
        with pytest.raises(StoreError, match=r"cannot be reached.*Gave up after"):
            call()


def test_the_portal_shows_folders_as_empty_objects(az, azurite):
    limpet.save(f"{az}/run/version_1", {"n": 1}, step=1)
    limpet.open_store(az).put_if_absent("run/version_1/empty", b"")
    expected = keys(limpet.open_store(az))
    for name in ("run/", "run/version_1/", "run/version_9/"):
        azurite.create_empty(f"{az.removeprefix('az://')}/{name}")
    assert keys(limpet.open_store(az)) == expected
    assert "version_1/empty" in keys(limpet.open_store(f"{az}/run"))
    assert [s.step for s in limpet.Run(f"{az}/run").snapshots()] == [1]
    assert run_cli("ls", f"{az}/run", "--json").json["versions"][0]["step"] == 1
    assert run_cli("sweep", f"{az}/run").code == 0
    assert limpet.load(f"{az}/run/version_1") == {"n": 1}


def test_an_object_that_obstore_cannot_list_is_named(az, azurite):
    azurite.create_empty(f"{az.removeprefix('az://')}/run//x")
    for call in (lambda: keys(limpet.open_store(az)), lambda: limpet.Run(f"{az}/run").latest()):
        with pytest.raises(StoreError, match=r"run//.*Rename or delete that object"):
            call()
