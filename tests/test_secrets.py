"""A secret in a URL, or in the environment, is in no message, output, event, or file."""

import json
import os
import traceback
import warnings
from pathlib import Path

import pytest

import limpet
from limpet.sinks import JsonLines
from tests.cli.invoke import run_cli
from tests.public_calls import URL_CALLS

SECRET = "hUnTeR2+sEcReT"
URLS = [
    f"s3://bucket/run?secret_access_key={SECRET}",
    f"s3://bucket/run/version_1?a=1&secret_access_key={SECRET}",
    f"s3://AKIA:{SECRET}@bucket/run",
    f"s3://{SECRET}@bucket/run@latest",
    f"az://container/run?sv=1&sig={SECRET}",
    f"gs://bucket/run?x-goog-signature={SECRET}",
    f"https://a.blob.core.windows.net/c?sv=1&sig={SECRET}",
    f"hdfs://user:{SECRET}@name:8020/run",
    f"hdfs://name:8020/run?delegation={SECRET}",
    f"file://user:{SECRET}@host/run",
    f"file://{SECRET}@host/run",
    f"tcp://127.0.0.1:1/{SECRET}{SECRET}",
    f"ftp://me@corp.com:{SECRET}@host/run",
    f"fsspec+ftp://me:{SECRET}@host/run",
    f"fsspec+memory://run?password={SECRET}",
    f"s3:/user:{SECRET}@bucket/run",
    f"az://bucket/run/version_1?sv=1&sig={SECRET}",
    f"az://user:{SECRET}@h//x",
    f"memory://user:{SECRET}@h//x",
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"vault://me:{SECRET}@127.0.0.1/run",  # a store of one's own
]
COMMANDS = [
    ("ls",), ("show",), ("verify",), ("sweep",), ("request-save",), ("pin",), ("rm",),
    ("evaluate",), ("diff", "run@1"), ("copy", "run@1"), ("reshard", "run@1"),
    ("import", "step_7.pt"),
    ("export", "--to", "safetensors", "run@1"), ("evaluate", "--connect"), ("run",),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import torch

    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)
    limpet.save("run/version_1", {"n": 1}, step=1)
    torch.save({"n": torch.ones(1)}, "step_7.pt")
    return tmp_path


def open_vault(url):
    """Return a store whose URL has its password."""
    return type(limpet.open_store("memory://x"))(url.removeprefix("vault://"))


@pytest.fixture
def shown(folder, capfd):
    """What has been shown and written, as text."""
    limpet.register_store("vault", open_vault)
    pieces = []
    sinks = limpet.attach(JsonLines(folder / "events.jsonl"))
    sinks.enter_context(limpet.attach(lambda name, fields: pieces.append(repr(fields))))
    with sinks, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield pieces
    pieces += [str(w.message) for w in caught]
    pieces += capfd.readouterr()
    pieces += [p.read_text("latin1") for p in folder.rglob("*") if p.is_file()]
    pieces += [str(p) for p in folder.rglob("*")]
    found = [piece for piece in pieces if SECRET in piece]
    assert not found, found


def describe(error):
    """Return the text of an error and of its causes, without the lines of this test."""
    texts = []
    while error is not None:
        texts += traceback.format_exception_only(error)
        texts += [repr(getattr(error, "fields", "")), repr(error), *getattr(error, "__notes__", ())]
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context
    return "".join(texts)


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
@pytest.mark.parametrize("name", URL_CALLS)
def test_no_function_shows_a_secret(shown, url, name):
    is_known = url.startswith(("s3", "az", "gs", "hdfs", "fsspec", "vault"))
    for text in (url, f"{url}/version_1", f"{url}@1", *[Path(url)] * is_known):
        try:
            shown.append(repr(URL_CALLS[name](text)))
        except limpet.errors.LimpetError as e:
            shown.append(describe(e))


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_no_command_shows_a_secret(shown, url):
    for words in COMMANDS if "://" in url else COMMANDS[:-1]:  # "s3:/" is the name of a program
        for text in (url, f"{url}@120", f"--json={url}"):
            result = run_cli(*words, text)
            shown += [result.out, result.err]
            shown += run_cli(*words, text, "--json")[1:]


def test_no_environment_is_shown(shown, monkeypatch):
    values = {
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ACCESS_KEY_ID": f"a\n{SECRET}",
        "AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:1",
        "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
        "AZURE_STORAGE_SAS_TOKEN": f"sig={SECRET}",
        "AZURE_STORAGE_ENDPOINT": f"http://user:{SECRET}@127.0.0.1:1",
        "GOOGLE_SERVICE_ACCOUNT": json.dumps({"private_key": SECRET}),
        "HTTPS_PROXY": f"http://user:{SECRET}@127.0.0.1:1",
        "HTTP_PROXY": f"http://user:{SECRET}@127.0.0.1:1",
        "LIMPET_SECRET": f"!{SECRET}",
    }
    for name, value in values.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            for url in ("s3://bucket/run", "az://bucket/run", "gs://bucket/run"):
                options = {} if "ENDPOINT" in name else {"endpoint": "http://127.0.0.1:1"}
                with pytest.raises(limpet.errors.LimpetError) as caught:
                    limpet.open_store(url, timeout=0.01, **options).put_if_absent("x", b"1")
                shown.append(describe(caught.value))
            shown += run_cli("evaluate", "--connect", "127.0.0.1:1")[1:]
    text = json.dumps({"url": f"ftp://me:{SECRET}@host/a"})
    shown.append(str(limpet.errors.StoreError("x", found=text, todo=text)))
