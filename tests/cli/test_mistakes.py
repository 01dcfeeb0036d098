"""Each common mistake gives an error of one line and a specific exit code."""

import os
import uuid
from pathlib import Path

import numpy as np
import pytest

import limpet as hf
from limpet import events
from limpet.cli import VERBS, exit_codes
from limpet.errors import (
    AlreadyExists,
    CommitError,
    Denied,
    DigestMismatch,
    FormatTooNew,
    LimpetError,
    MissingLeaf,
    NoSnapshot,
    NoSpace,
    NotFound,
    StoreError,
    Unavailable,
)
from limpet.run.run import Run
from limpet.storage.open import open_store
from tests.cli.invoke import check_error_line, run_cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with a run ``runs/a`` of versions 1, 2, and 10."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 10):
        hf.save(f"runs/a/version_{step}", {"x": np.arange(3)})
    return tmp_path


def test_a_run_instead_of_a_snapshot(folder):
    message = "runs/a is a run of 3 versions, not a snapshot. Name one of them, such as"
    check_error_line(run_cli("diff", "runs/a/version_1", "runs/a"), 4, message, "runs/a/version_10")
    check_error_line(run_cli("reshard", "runs/a", "out", "--shards", 1), 4, message)


def test_show_and_export_use_the_newest_version_of_a_run(folder):
    note = "limpet: runs/a is a run; this is its newest intact version, version_10\n"
    shown = run_cli("show", "runs/a")
    assert (shown.code, shown.err) == (0, note)
    assert "runs/a/version_10" in shown.out
    exported = run_cli("export", "runs/a", "--to", "torch", "out/a.pt")
    assert exported.code == 0
    assert exported.err.startswith(note)
    found = run_cli("show", "runs/a/", "--json")
    assert (found.err, found.json["step"]) == ("", 10)
    (folder / "runs/a/version_10/manifest.json").write_text("{}")  # the newest intact one
    assert run_cli("show", "runs/a", "--json").json["step"] == 2


def test_a_version_instead_of_a_run(folder):
    for verb in ("ls", "sweep", "request-save"):
        check_error_line(
            run_cli(verb, "runs/a@2"), 4, "runs/a@2 is one version, not a run. Use the run: runs/a."
        )
        check_error_line(run_cli(verb, "runs/a@best"), 4, "Use the run: runs/a.")
        check_error_line(run_cli(verb, "runs/aa@2"), 4, "no run at runs/aa. ", "Check the path")
    check_error_line(run_cli("pin", "runs/a@2", 2), 2, "runs/a@2 is one version")


@pytest.mark.parametrize("address", ["@best:", "@version_2", "@", "/2", "@-1", "/best"])
def test_an_almost_valid_address(folder, address):
    forms = "RUN/version_120, RUN@120 (on branch 1: RUN@120.1), RUN@latest, RUN@best, or"
    check_error_line(
        run_cli("show", f"runs/a{address}"), 4, f"no snapshot at runs/a{address}. ", forms
    )
    check_error_line(run_cli("show", f"memory://never-expected{address}"), 4, forms)


@pytest.mark.parametrize("location", [".", "./", ".."])
def test_a_relative_path_of_dots_is_resolved_in_the_message(folder, monkeypatch, location):
    (folder / "empty" / "more").mkdir(parents=True)
    monkeypatch.chdir(folder / "empty" / "more")
    message = f"There is no run at {os.path.abspath(location)}. Expected a folder of versions"
    check_error_line(run_cli("ls", location), 4, message)
    check_error_line(run_cli("show", f"{location}@20"), 4, message)


@pytest.mark.parametrize("verb", ["ls", "verify", "sweep", "show"])
def test_an_empty_folder(folder, verb):
    (folder / "empty").mkdir()
    check_error_line(run_cli(verb, "empty"), 4, "an empty folder")


def test_a_large_folder_of_other_files_is_not_listed(folder, monkeypatch):
    def fail(self):
        raise RuntimeError("the whole folder is listed")

    monkeypatch.setattr(Run, "listing", fail)
    for verb in ("verify", "sweep", "show"):
        assert run_cli(verb, "runs").code == 4


def test_dot_and_dot_dot_are_valid_paths(folder, monkeypatch):
    monkeypatch.chdir(folder / "runs/a")
    assert run_cli("ls", ".").code == 0
    assert run_cli("verify", "./").code == 0
    monkeypatch.chdir(folder / "runs/a/version_1")
    assert run_cli("show", ".").code == 0
    assert run_cli("verify", ".").code == 0
    assert run_cli("ls", "..").code == 0
    check_error_line(run_cli("ls", "."), 4, "is one snapshot")


@pytest.mark.parametrize(
    "location", ["", "s3://bucket/run", "file://other-host/x", "memory://", "/"]
)
@pytest.mark.parametrize("verb", ["ls", "verify", "sweep", "show"])
def test_urls_that_name_no_location(verb, location):
    result = run_cli(verb, location)
    check_error_line(result, result.code)
    assert result.code in (4, 5)


def test_unprintable_names(folder):
    result = run_cli("ls", "runs/\x1b[31mred\nx")
    check_error_line(result, 4)
    assert "\x1b" not in result.err
    os.mkdir(b"runs/\xff")
    assert run_cli("ls", "runs/\udcff").code == 4


def test_json_errors(folder):
    result = run_cli("reshard", "runs/a", "out", "--shards", 1, "--json")
    assert result.code == 4
    report = result.json
    assert list(report) == ["error", "exit"]
    assert report["error"]["kind"] == "NotFound"
    assert report["exit"] == 4
    assert result.err.count("\n") == 1


def test_a_typo_in_the_command():
    check_error_line(run_cli("qqqq", "x"), 2, "No such command 'qqqq'. ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"], ["diff", "a"], ["ls", "a", "b"], ["ls", "a", "--jsno"], ["--jsno"], ["lss"],
        ["pin", "a", "ftp://me:S3CRET@h/x"], ["ls", "a", "https://h/x?sig=S3CRET"],
        ["ftp://me:S3CRET@h/x"], ["ls", "a", "b", "--json"],
    ],
)  # fmt: skip
def test_invalid_arguments(arguments):
    result = run_cli(*arguments)
    check_error_line(result, 2)
    assert result.out == ""
    verb = f" {arguments[0]}" if arguments[0] in VERBS else ""
    assert result.err.endswith(f" See `cli{verb} --help`.\n")
    assert "S3CRET" not in result.err


def test_no_arguments_show_the_help():
    result = run_cli()
    assert "Commands:" in result.out + result.err


@pytest.mark.parametrize("arguments", [["pin", 1], ["request-save"], ["copy", "memory://no"]])
def test_what_python_can_do_and_no_command(arguments):
    """``fsspec+`` stores accept no writes until a program accepts their weakness."""
    url = f"fsspec+memory://{uuid.uuid4().hex}"
    weak = open_store(url, allow_weak=True)
    hf.save(open_store(f"{url}/version_1", allow_weak=True), {"n": 1}, step=1)
    verb, *rest = arguments
    other = [f"{url}/version_1", f"{url}/copy"] if verb == "copy" else [url, *rest]
    result = run_cli(verb, *other)
    check_error_line(result, 5, "allow_weak=True", "No command can accept it, but Python can")
    assert hf.Run(weak).pin(1).step == 1


def emit_waiting(seconds=295.2, store="s3://bucket/runs/a"):
    error = Unavailable("Could not connect to http://h:1", todo="Check the network")
    events.emit("waiting", store=store, action="list folder", error=error, seconds=seconds)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_that_waits_for_a_server_says_so_once(run, monkeypatch, as_json):
    listing = Run.listing

    def wait(self):
        emit_waiting()
        emit_waiting(265.2)
        emit_waiting(store="s3://other")
        return listing(self)

    monkeypatch.setattr(Run, "listing", wait)
    result = run_cli("ls", run, *(["--json"] if as_json else []))
    assert result.code == 0
    assert result.err.splitlines() == ([] if as_json else [
        f"limpet: waiting for {store}: Could not connect to http://h:1."
        " (up to 295 s; Ctrl-C stops it)"
        for store in ("s3://bucket/runs/a", "s3://other")
    ])  # fmt: skip
    emit_waiting()  # the command is over


def test_an_unknown_environment_variable(folder, monkeypatch):
    monkeypatch.setenv("LIMPET_THREDS", "2")
    check_error_line(run_cli("verify", "runs/a"), 1, "LIMPET_THREDS")


ERRORS: list[tuple[BaseException, int]] = [
    (LimpetError("x"), 1),
    (DigestMismatch("x"), 3),
    (NotFound("x"), 4),
    (NoSnapshot("x"), 4),
    (FileNotFoundError(2, "No such file", "x"), 4),
    (Denied("x"), 5),
    (NoSpace("x"), 5),
    (StoreError("x"), 5),
    (PermissionError(13, "Permission denied", "x"), 5),
    (FormatTooNew("x"), 6),
    (MissingLeaf("x"), 6),
    (AlreadyExists("x"), 8),
    (Unavailable("x"), 9),
    (CommitError("x"), 10),
    (KeyboardInterrupt(), 130),
]


def test_every_kind_of_failure_has_its_exit_code(run, monkeypatch):
    raised: list[BaseException] = []

    def fail(self):
        raise raised[-1]

    monkeypatch.setattr(Run, "listing", fail)
    for error, code in ERRORS:
        raised.append(error)
        check_error_line(run_cli("ls", run), code)
    raised.append(ZeroDivisionError())  # a mistake in Limpet is not caught
    with pytest.raises(ZeroDivisionError):
        run_cli("ls", run)


def test_the_help_lists_the_exit_codes():
    result = run_cli("--help")
    assert result.code == 0
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"{code}  {meaning}" in result.out
    assert all(verb in result.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help_and_json(verb):
    result = run_cli(verb, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_the_documentation_lists_the_exit_codes():
    document = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"| {code} | {meaning} |" in document
