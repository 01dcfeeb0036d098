"""Lists and ranks in messages, and the line that a warning names."""

import warnings
from pathlib import Path

import pytest

from limpet.errors import SaveFailed
from limpet.text import hide_secrets, warn_user


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:SECRET@bucket/run does not", "s3://...@bucket/run does not"),
        ("http://key:SEC/RET@host:1/a, then", "http://...@host:1/a, then"),
        ("ftp://SECRET@host/a", "ftp://...@host/a"),
        ("ftp://me@corp.com:SECRET@host/a@b", "ftp://...@host/a@b"),
        ("sftp://me@corp.com:SECRET@host:22/a", "sftp://...@host:22/a"),
        ("s3://key:SEC@RET@bucket/run", "s3://...@bucket/run"),
        ("sftp://me@corp.com:SEC/RET@host/a", "sftp://...@host/a"),
        ("sftp://me@host:22/a@120", "sftp://...@host:22/a@120"),
        ("'az://c/x?sv=1&sig=SECRET': no", "'az://c/x?...': no"),
        ("url: /v1/a?delegation=SECRET&op=X (Caused", "url: /v1/a?... (Caused"),
        ("found fsspec+simplecache::ftp://u:SECRET@h/x", "found fsspec+simplecache::ftp://...@h/x"),
        ("hdfs://host:8020/runs/a@120 and s3://b/a@latest", None),
        ("Is it s3://bucket/what? x = 1", None),
    ],
)
def test_secrets_of_urls_are_hidden(text, expected):
    assert hide_secrets(text) == (text if expected is None else expected)


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_a_warning_names_the_line_that_called_limpet(depth):
    """However deep in the package it is made: the frames above it belong to ``limpet.x``."""
    inside: dict[str, object] = {"__name__": "limpet.x", "warn_user": warn_user}
    exec(
        "def call(depth, category):\n"
        "    if depth:\n"
        "        call(depth - 1, category)\n"
        "    else:\n"
        "        warn_user('text', category)\n",
        inside,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside["call"](depth, SaveFailed)
    assert [(w.filename, str(w.message)) for w in caught] == [(__file__, "text")]
    assert "inside[" in Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
