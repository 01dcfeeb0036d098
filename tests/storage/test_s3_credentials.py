"""The credentials of ``s3://``: programs that fail, and an environment that changes."""

import gc
import json
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from botocore.credentials import RefreshableCredentials

from limpet.errors import Denied, StoreError, Unavailable
from limpet.settings import BOTO3_VARIABLES, OBSTORE_VARIABLES, find_variables
from limpet.storage import s3 as s3_store
from tests.storage.fake_s3 import open_run

pytestmark = pytest.mark.slow


def use_program(monkeypatch, tmp_path, command):
    """Let a program print the credentials."""
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


def test_a_program_for_credentials_that_hangs(s3, monkeypatch, tmp_path):
    use_program(monkeypatch, tmp_path, "sleep 30")
    store, start = open_run(s3, timeout=2), time.monotonic()
    for _ in range(2):
        with pytest.raises(Unavailable, match="credentials did not arrive in time"):
            store.stat("a")
    assert time.monotonic() - start < 8
    names = [t.name for t in threading.enumerate()]
    assert names.count("limpet-credentials") == 1


@pytest.mark.parametrize("is_used", [True, False])
def test_a_renewal_of_credentials_that_hangs(s3, monkeypatch, tmp_path, is_used):
    """Requests go on as long as the credentials are valid for some minutes."""
    monkeypatch.setattr(s3_store, "CREDENTIALS_TIMEOUT", 1)
    end = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    found = {"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "Expiration": end}
    (tmp_path / "found").write_text(json.dumps(found))
    (tmp_path / "program").write_text(f"mkdir {tmp_path}/first || sleep 30; cat {tmp_path}/found")
    use_program(monkeypatch, tmp_path, f"sh {tmp_path}/program")
    s3.objects["run/a"], store = b"1", open_run(s3, timeout=4)
    assert store.get("a", 9) == b"1"
    monkeypatch.setattr(RefreshableCredentials, "_advisory_refresh_timeout", 3 * 3600)
    if not is_used:
        monkeypatch.setattr(s3_store, "_LAST_MINUTES", 3 * 3600)
    start = time.monotonic()
    for _ in range(3 if is_used else 1):
        if is_used:
            assert store.get("a", 9) == b"1"
        else:
            with pytest.raises(Unavailable, match="credentials did not arrive in time"):
                store.get("a", 9)
    assert time.monotonic() - start < (4 if is_used else 20)


def test_a_program_for_credentials_that_prints_something_else(s3, monkeypatch, tmp_path):
    use_program(monkeypatch, tmp_path, "echo SECRET")
    with pytest.raises(Denied, match=r"no credentials.*credential_process") as caught:
        open_run(s3).stat("a")
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_a_profile_of_sso_without_a_login(s3, monkeypatch, tmp_path):
    (tmp_path / "config").write_text(
        "[profile team]\nsso_account_id = 1\nsso_role_name = r\nsso_region = us-east-1\n"
        "sso_start_url = https://login.invalid/start\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Denied, match="aws sso login"):
        open_run(s3, profile="team").stat("a")


@pytest.mark.parametrize(
    ("proxy", "kind", "message"),
    [
        ("http://user:SECRET@127.0.0.1:9", Unavailable, "cannot be reached. Check HTTP_PROXY"),
        ("socks5://user:SECRET@127.0.0.1:9", Unavailable, "proxy cannot be reached"),
        (
            "http://user:SEC/RET@127.0.0.1:9",
            StoreError,
            "is invalid.*HTTP_PROXY",
        ),
        ("http://user:SEC#RET@127.0.0.1:9", StoreError, "is invalid"),
        ("http://user:SECRET@127.0.0.1:99999", StoreError, "is invalid"),
        ("http://user:SEC\nRET@127.0.0.1:9", Unavailable, "proxy cannot be reached"),
    ],
)
def test_a_wrong_proxy_shows_no_password(s3, monkeypatch, proxy, kind, message):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with pytest.raises(StoreError, match=message) as caught:
        open_run(s3, timeout=4).stat("a")
    assert type(caught.value) is kind
    assert "SEC" not in "".join(traceback.format_exception(caught.value))


def test_a_token_with_a_line_break_is_not_shown(s3, monkeypatch):
    store = open_run(s3, timeout=30)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "SECRET\n")
    with pytest.raises(StoreError, match="contains a line break") as caught:
        store.stat("a")
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_credentials_that_change_in_the_environment_leave_nothing_behind(s3, monkeypatch):
    """A training that renews its session token every hour."""
    s3.objects["run/a"] = b"1"
    store = open_run(s3)
    store.get("a", 9)
    before, found = len(s3_store._servers), []
    for number in range(5):
        monkeypatch.setenv("AWS_SESSION_TOKEN", f"token{number}")
        assert store.get("a", 9) == b"1"
        found.append(weakref.ref(store.remote.server))
    assert len(s3_store._servers) == before
    end = time.monotonic() + 60  # the threads that fetched the credentials are about to end
    while sum(s() is not None for s in found) > 1 and time.monotonic() < end:
        gc.collect()
    assert [s() is None for s in found] == [True, True, True, True, False]


@pytest.mark.parametrize("are_renewed", [True, False])
def test_refused_credentials_are_looked_for_again(s3, monkeypatch, tmp_path, are_renewed):
    """As with a program that writes new credentials to the file when the old ones expire."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id=old\naws_secret_access_key=x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.objects["run/a"], store, refused = b"1", open_run(s3), []
    assert store.get("a", 9) == b"1"

    def expired(method, path, handler):
        if "=old/" not in handler.headers["Authorization"]:
            return False
        refused.append(path)
        handler.fail(403, "ExpiredToken")
        return True

    s3.hook = expired
    if are_renewed:
        file.write_text("[default]\naws_access_key_id=new\naws_secret_access_key=x\n")
        assert store.get("a", 9) == b"1"
        assert len(refused) == 1
    else:
        with pytest.raises(Denied, match="ExpiredToken"):
            store.get("a", 9)
        assert len(refused) == 2
        file.write_text("[default]\naws_access_key_id=new\naws_secret_access_key=x\n")
        assert store.get("a", 9) == b"1"


class Changing(Mapping):
    """An environment from which another thread removes a variable while it is read."""

    def __iter__(self):
        return iter(["AWS_PROFILE", "AWS_SESSION_TOKEN", "AZURE_CLIENT_ID"])

    def __len__(self):
        return 3

    def __getitem__(self, name):
        return {"AWS_PROFILE": "team"}[name]


def test_a_variable_that_is_removed_while_it_is_read():
    assert find_variables(BOTO3_VARIABLES, Changing()) == {("AWS_PROFILE", "team")}
    assert find_variables(OBSTORE_VARIABLES, Changing()) == frozenset()
