"""``limpet ls FOLDER``: a line for each run."""

import os
import re
import shutil
import time

import pytest

import limpet
from limpet import machine
from limpet.errors import Unavailable
from limpet.format.names import MANIFEST, WRITER_LOCK, Version
from limpet.format.records import Objective, Pin, encode_record
from limpet.run import overview
from limpet.run.overview import summarize_runs
from limpet.run.policy import EverySteps, KeepBest, KeepLast, StopWhen
from limpet.run.records import record_objective
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.storage.store import Entry
from tests.cli.invoke import check_error_line, run_cli, train_branch
from tests.forging import seal, sealed_content
from tests.trainings import damage_version, flip_bit, shard_of, train, training


def train_run(place, last_step=40, keep=None, every=20):
    with training(place, EverySteps(every), keep) as (state, ckpt):
        train(state, ckpt, last_step)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with the runs ``a`` (best: step 20) and ``b``."""
    folder = tmp_path_factory.mktemp("ls")
    train_run(folder / "a", 60, KeepBest(9, "loss", mode="min"))
    train_run(folder / "b", 40)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "runs")


def list_runs(folder):
    result = run_cli("ls", folder, "--json")
    assert result.code == 0, result
    return {run["name"]: run for run in result.json["runs"]}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # pytest-xdist sets it, too


def lines_of(folder):
    """Return the line of each run in the table."""
    lines = run_cli("ls", folder).out.splitlines()
    return {line.split()[0]: line for line in lines[2:]}


def lock_of(folder, **changes):
    host, boot, process = machine.process_identity()
    own = {"host": host, "boot": boot, "process": process}
    lock = Pin("0" * 12, None, "2026-01-02T03:04:05+00:00", **{**own, **changes})
    (folder / WRITER_LOCK).write_bytes(encode_record(lock))


def test_a_line_for_each_run(folder):
    runs = list_runs(folder)
    assert list(runs) == ["a", "b"]
    assert list(runs["a"]) == [
        "name", "url", "latest", "created", "bytes", "versions", "damaged", "metrics", "best",
        "running", "writer", "ended", "problem",
    ]  # fmt: skip
    best = Run(folder / "a").best("loss", "min")
    loss = best.metadata["metrics"]["loss"]
    assert runs["a"]["best"]["loss"] == {"mode": "min", "version": str(best.version), "value": loss}
    assert runs["b"]["best"] == {}
    assert runs["a"]["latest"] == "version_60"
    assert (runs["a"]["versions"], runs["b"]["versions"]) == (3, 2)
    versions = run_cli("ls", folder / "b", "--json").json["versions"]
    assert runs["b"]["bytes"] == sum(v["bytes"] for v in versions)
    lines = lines_of(folder)
    assert re.search(r"a +60 +\S+ \S+ +\S+ KiB  finished  loss \S+ \(step \d+\)$", lines["a"])
    assert re.search(r"b +40 .* finished +loss \S+$", lines["b"])


def test_the_folder_may_be_any_store():
    store = open_store("memory://ls-any")
    train_run(store.at("exp").at("a"))
    assert run_cli("ls", "memory://ls-any/exp", "--json").json["runs"][0]["name"] == "a"
    assert "40" in run_cli("ls", "memory://ls-any/exp").out


@pytest.mark.slow
def test_the_runs_in_a_bucket(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    train_run("s3://bucket/exp/a", 40, KeepBest(9, "loss", mode="min"))
    train_run("s3://bucket/exp/b", 20)
    s3.objects.update({"bucket/exp/data/x": b"x", "bucket/exp/notes.txt": b"x"})
    runs = list_runs("s3://bucket/exp")
    assert [(r["name"], r["latest"]) for r in runs.values()] == [
        ("a", "version_40"), ("b", "version_20"),
    ]  # fmt: skip
    assert list(runs["a"]["best"]) == ["loss"]
    best = run_cli("best", "s3://bucket/exp", "--json").json["runs"][0]
    assert best["address"].startswith("s3://bucket/exp/")
    assert run_cli("show", best["address"]).code == 0
    summaries = summarize_runs(open_store("s3://bucket/exp"))
    with training("s3://bucket/exp/b", EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 40)
    assert latest_of(summarize_runs(open_store("s3://bucket/exp"), summaries))["b"] == Version(40)


def test_the_run_with_the_newest_version_is_the_last(folder):
    train_run(folder / "0", 20)
    os.rename(folder / "a", folder / "z")
    path = folder / "0/version_20" / MANIFEST
    content = {**sealed_content(path.read_bytes()), "created": "2036-01-02T03:04:05+00:00"}
    path.write_bytes(seal(content))
    assert list(list_runs(folder))[-1] == "0"


def test_a_run_that_trains_is_running_with_host_and_process(folder):
    with training(folder / "c", EverySteps(20)) as (state, ckpt):
        train(state, ckpt, 20)
        run = list_runs(folder)["c"]
        assert run["running"] is True
        assert run["writer"]["holder"].startswith(f"process {os.getpid()} on ")
        assert f"running: process {os.getpid()} on " in lines_of(folder)["c"]
    assert "finished" in lines_of(folder)["c"]


def test_a_run_of_another_machine_may_be_running(folder):
    lock_of(folder / "b", host="node-7 pid:[1]", process="4711:99")
    run = list_runs(folder)["b"]
    assert run["running"] is None
    line = lines_of(folder)["b"]
    assert re.search(r"locked for \d+ d: process 4711 on node-7", line)


@pytest.mark.parametrize("changes", [{"process": "4194305:1"}, {"boot": "earlier"}])
def test_a_lock_of_a_dead_process_of_this_machine_is_not_running(folder, changes):
    for record in (folder / "b").glob("version_*/eval-*"):
        record.unlink()
    lock_of(folder / "b", **changes)
    assert list_runs(folder)["b"]["running"] is False
    assert "not running" in lines_of(folder)["b"]


def test_a_run_before_its_first_version_is_listed(folder):
    (folder / "c").mkdir()
    lock_of(folder / "c")
    assert list_runs(folder)["c"]["latest"] is None
    assert "running: process" in lines_of(folder)["c"]


def test_metrics_of_evaluations_and_several_objectives(folder):
    run = Run(folder / "b")
    for step, value in ((20, 0.9), (40, 0.5)):
        run.add_metrics(step, {"accuracy": value, "error": 1 - value})
    record_objective(run.store, Objective("accuracy", "max"))
    record_objective(run.store, Objective("error", "min"))
    assert list_runs(folder)["b"]["best"] == {
        "accuracy": {"mode": "max", "version": "version_20", "value": 0.9},
        "error": {"mode": "min", "version": "version_20", "value": pytest.approx(0.1)},
    }
    record_objective(run.store, Objective("error", "max"))
    assert list(list_runs(folder)["b"]["best"]) == ["accuracy"]


def test_abandoned_versions_do_not_count(tmp_path):
    store = LocalStore(tmp_path / "a")
    train_run(store, 60, KeepBest(9, "loss", mode="max"))
    train_branch(store, start=20, last_step=40)
    run = list_runs(tmp_path)["a"]
    assert run["latest"] == "version_40.1"
    assert run["versions"] == 2
    assert re.search(r"a +40.1 ", lines_of(tmp_path)["a"])


@pytest.mark.parametrize("damage", ["manifest", "short", "missing"])
def test_damaged_versions_are_counted(folder, damage):
    damage_version(LocalStore(folder / "b"), "version_40", damage)
    run = list_runs(folder)["b"]
    assert (run["latest"], run["damaged"]) == ("version_20", 1)
    assert run["problem"]["message"]
    result = run_cli("ls", folder)
    assert "1 damaged" in lines_of(folder)["b"]
    assert "\nb: " in result.out
    assert list_runs(folder)["a"]["damaged"] == 0


def test_a_version_of_a_newer_format(folder):
    path = folder / "b/version_40" / MANIFEST
    path.write_bytes(seal(sealed_content(path.read_bytes()), 7))
    assert list_runs(folder)["b"]["problem"]["kind"] == "FormatTooNew"
    assert "too new" in lines_of(folder)["b"]


def test_a_lock_of_a_newer_format_does_not_end_the_listing(folder):
    lock_of(folder / "b")
    path = folder / "b" / WRITER_LOCK
    path.write_bytes(seal(sealed_content(path.read_bytes()), 7))
    assert list_runs(folder)["b"]["problem"]["kind"] == "FormatTooNew"
    assert list_runs(folder)["a"]["problem"] is None


def test_half_deleted_runs_have_no_version(folder):
    for step in (20, 40):
        os.unlink(folder / f"b/version_{step}" / MANIFEST)
    run = list_runs(folder)["b"]
    assert (run["latest"], run["damaged"], run["bytes"]) == (None, 0, 0)
    assert "no version" in lines_of(folder)["b"]


def test_links(folder, tmp_path):
    outside = tmp_path / "outside"
    os.rename(folder / "b", outside)
    os.symlink(outside, folder / "linked")
    os.symlink(folder / "loop", folder / "loop")
    os.symlink(tmp_path / "nothing", folder / "dangling")
    os.symlink(folder, folder / "up")
    runs = list_runs(folder)
    assert runs["a"]["problem"] is None
    assert runs["linked"]["latest"] == "version_40"
    assert "up" not in runs
    for name in ("loop", "dangling"):
        assert runs[name]["problem"]["kind"] == "BrokenLink"


def test_what_belongs_to_somebody_else_is_not_listed(folder):
    (folder / "data").mkdir()
    (folder / "data" / "x.bin").write_bytes(b"x")
    (folder / "notes.txt").write_text("x")
    (folder / "empty").mkdir()
    shutil.copytree(folder / "a", folder / "nested" / "a")
    limpet.save(folder / "alone", {"x": 1})
    assert list(list_runs(folder)) == ["a", "b"]


def test_names_are_printed_on_one_line(folder):
    os.rename(folder / "b", folder / "b\n\x1b[31mc\udcff")
    result = run_cli("ls", folder)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert len(result.out.splitlines()) == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_run_without_permission(folder):
    (folder / "b").chmod(0)
    try:
        assert list_runs(folder)["b"]["problem"]["kind"] == "Denied"
        assert "unreadable" in lines_of(folder)["b"]
    finally:
        (folder / "b").chmod(0o700)


def test_a_run_that_cannot_be_read_does_not_end_the_listing(folder, monkeypatch):
    real = LocalStore.list_level

    def list_level(self, *arguments, **options):
        if self.url.endswith("/b"):
            raise Unavailable("The server is down", store=self.url)
        return real(self, *arguments, **options)

    monkeypatch.setattr(LocalStore, "list_level", list_level)
    runs = list_runs(folder)
    assert runs["b"]["problem"]["kind"] == "Unavailable"
    assert "no version" not in lines_of(folder)["b"]
    assert runs["a"]["problem"] is None
    assert "unreadable" in lines_of(folder)["b"]


def test_a_version_that_retention_deletes_during_the_listing(folder, monkeypatch):
    """The listing of the run shows only the version that is deleted before it is read."""
    train_run(folder / "c", 20, KeepLast(1))
    real, done = LocalStore.stat, []

    def stat(self, key):
        if self.url.endswith("/c") and key == f"version_20/{MANIFEST}" and not done:
            done.append(key)
            shutil.copytree(folder / "b/version_40", folder / "c/version_40")
            shutil.rmtree(folder / "c/version_20")
        return real(self, key)

    monkeypatch.setattr(LocalStore, "stat", stat)
    assert list_runs(folder)["c"]["latest"] == "version_40"
    assert done


def test_a_run_that_is_deleted_during_the_listing(folder, monkeypatch):
    real = LocalStore.stat

    def stat(self, key):
        if self.url.endswith("/b"):
            shutil.rmtree(folder / "b", ignore_errors=True)
        return real(self, key)

    monkeypatch.setattr(LocalStore, "stat", stat)
    runs = list_runs(folder)
    assert runs["a"]["latest"] == "version_60"
    assert "b" not in runs or runs["b"]["latest"] is None


# -- what is no folder of runs -----------------------------------------------------------------


def test_a_run_that_contains_runs_is_a_run(folder):
    shutil.copytree(folder / "b", folder / "a" / "inner")
    assert run_cli("ls", folder / "a", "--json").json["latest"] == "version_60"


def test_a_folder_named_like_a_version_may_contain_runs(folder):
    os.rename(folder / "a", folder / "version_0")
    os.rename(folder / "b", folder / "version_1")
    assert list(list_runs(folder)) == ["version_0", "version_1"]


@pytest.mark.parametrize("what", ["nothing", "empty", "file", "snapshot", "foreign", "address"])
def test_nothing_to_list(folder, what):
    place = folder / what
    if what == "empty":
        place.mkdir()
    elif what == "file":
        place.write_text("x")
    elif what == "snapshot":
        place = folder / "a/version_20"
    elif what == "foreign":
        (place / "sub").mkdir(parents=True)
        (place / "sub" / "x").write_text("x")
    elif what == "address":
        place = f"{folder}/a@20"
    check_error_line(run_cli("ls", place), 4)
    check_error_line(run_cli("ls", place, "--watch"), 4)
    check_error_line(run_cli("best", place, "--metric", "loss"), 4)


def test_only_the_first_of_many_other_folders_are_looked_at(tmp_path, monkeypatch):
    looked_at = []

    def list_level(self, folder, prefix=""):
        if folder:
            return
        for number in range(5000):
            looked_at.append(number)
            yield Entry(f"data-{number}", "folder")

    monkeypatch.setattr(MemoryStore, "list_level", list_level)
    monkeypatch.setattr(MemoryStore, "at", lambda self, name: LocalStore(tmp_path / name))
    assert summarize_runs(MemoryStore()) == []
    assert len(looked_at) == 1000


# -- what has not changed ----------------------------------------------------------------------


@pytest.fixture
def settled(monkeypatch):
    """Let all changes be long ago, as if the clock were fine enough."""
    monkeypatch.setattr(overview, "_SETTLED", -9.0)


def latest_of(summaries):
    return {s.name: s.records[-1].version for s in summaries if s.records}


def test_nothing_is_read_again_if_nothing_changed(folder, settled):
    store = LocalStore(folder)
    first = summarize_runs(store)
    assert all(a is b for a, b in zip(first, summarize_runs(store, first), strict=True))


def test_a_recent_change_is_not_taken_for_the_last_one(folder):
    store = LocalStore(folder)
    first = summarize_runs(store)
    assert all(s.states is None for s in first)
    assert all(a is not b for a, b in zip(first, summarize_runs(store, first), strict=True))


@pytest.mark.parametrize(
    "change", ["save", "delete", "evaluate", "lock", "damage", "end", "branch"]
)
def test_every_change_is_seen(folder, settled, change):
    store, run = LocalStore(folder), Run(folder / "b")
    first = {s.name: s for s in summarize_runs(store)}
    if change == "save":
        shutil.copytree(folder / "a/version_60", folder / "b/version_60")
    elif change == "delete":
        run.delete(20)
    elif change == "evaluate":
        run.add_metrics(20, {"loss": -1.0})
    elif change == "lock":
        lock_of(folder / "b")
    elif change == "damage":
        os.unlink(folder / "b" / shard_of(run.store, "version_20"))
    elif change == "end":
        next((folder / "b").glob("version_40/eval-*ended*")).unlink()
    elif change == "branch":
        train_branch(run.store, start=20, last_step=40)
    now = {s.name: s for s in summarize_runs(store, first.values())}
    assert now["a"] is first["a"]
    fresh = {s.name: s for s in summarize_runs(store)}
    assert now["b"] != first["b"]
    for name in ("created", "nbytes", "records", "damaged", "ended", "writer"):
        assert getattr(now["b"], name) == getattr(fresh["b"], name), name


def test_a_change_in_place_is_seen_after_a_minute(folder, settled, monkeypatch):
    store = LocalStore(folder)
    first = summarize_runs(store)
    shard = folder / "b" / shard_of(LocalStore(folder / "b"), "version_40")
    os.truncate(shard, 10)
    assert latest_of(summarize_runs(store, first))["b"] == Version(40)
    now = time.monotonic() + overview.CHECK_AGAIN
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert latest_of(summarize_runs(store, first))["b"] == Version(20)


def test_another_run_with_branches_in_the_place_of_one_is_seen(tmp_path, settled, monkeypatch):
    """A catalog keeps records of branches: a watch of changing runs must not keep it for ever."""

    def branch_from(step):
        with training(LocalStore(tmp_path / "a"), EverySteps(20)) as (state, ckpt):
            train(state, ckpt, 60)
        with training(LocalStore(tmp_path / "a"), EverySteps(20)) as (state, ckpt):
            ckpt.resume(at=step)
            train(state, ckpt, 60)

    branch_from(20)
    seen = summarize_runs(LocalStore(tmp_path))
    shutil.rmtree(tmp_path / "a")
    branch_from(40)
    now = time.monotonic()
    for seconds in (30, 61):  # not unchanged in between
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        seen = summarize_runs(LocalStore(tmp_path), seen)
    versions = [str(r.version) for r in seen[0].records]
    assert versions == ["version_20", "version_40", "version_60.1"]


def test_other_stores_are_listed_again():
    store = MemoryStore()
    train_run(store.at("a"), 20)
    first = summarize_runs(store)
    assert latest_of(first) == {"a": Version(20)}
    with training(store.at("a"), EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 40)
    assert latest_of(summarize_runs(store, first)) == {"a": Version(40)}


@pytest.mark.slow
def test_a_thousand_runs(original, tmp_path, settled):
    """Two seconds of processor time, a fifth if nothing has changed: with much room here, because
    the tests run on loaded machines."""
    for number in range(1000):
        shutil.copytree(original / "a", tmp_path / f"run-{number}", copy_function=os.link)
    store, began = LocalStore(tmp_path), time.process_time()
    first = summarize_runs(store)
    read, again = time.process_time() - began, time.process_time()
    assert len(first) == 1000
    assert all(a is b for a, b in zip(first, summarize_runs(store, first), strict=True))
    unchanged = time.process_time() - again
    assert read < 4
    assert unchanged < 0.4


# -- a narrow terminal -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "resnet50_lr0.001_batch256_augmented_seed17_second_try"])
def test_the_best_metric_is_shown_on_80_columns(tmp_path, monkeypatch, name):
    """Also for a long name of a run, and for a reason of the end that is long."""
    stop = StopWhen("loss", 1, "max")
    with training(tmp_path / name, EverySteps(20), stop=stop) as (state, ckpt):
        while not ckpt.should_stop:
            train(state, ckpt, state["progress"].step + 1)
    monkeypatch.setenv("COLUMNS", "80")
    [run] = list_runs(tmp_path).values()
    assert run["ended"].startswith("stopped by StopWhen(")
    [_, _, line] = run_cli("ls", tmp_path).out.splitlines()
    assert "stopped early" in line
    assert re.search(r"loss [0-9.]+ \(step \d+\)$", line)
    assert len(line) <= 80


def test_damage_is_shown_on_80_columns(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    os.rename(folder / "b", folder / ("b" * 60))
    lock_of(folder / ("b" * 60), host="n" * 60)
    flip_bit(LocalStore(folder / ("b" * 60)), f"version_40/{MANIFEST}")
    line = next(line for name, line in lines_of(folder).items() if name.startswith("bbb"))
    assert "1 damaged" in line
    assert "loss" in line
    assert len(line) <= 80


# -- a run that also holds runs ----------------------------------------------------------------


def test_a_run_names_the_runs_in_its_folder(folder):
    shutil.copytree(folder / "a/version_20", folder / "version_20")
    (folder / "logs" / "version_0").mkdir(parents=True)  # of another library
    os.symlink(folder / "loop", folder / "loop")
    assert run_cli("ls", folder, "--json").json["contained_runs"] == ["a", "b"]
    assert f"also holds 2 runs: limpet ls {folder}/a" in run_cli("ls", folder).out
    assert "also holds" not in run_cli("ls", folder / "a").out
    best = f"{folder} also holds runs: limpet best {folder}/a"
    check_error_line(run_cli("best", folder, "--metric", "x", "--mode", "min"), 4, best)
    check_error_line(run_cli("best", folder, "--metric", "x"), 1, "--mode min|max", best)
    advice = run_cli("rm", folder, "20").err
    assert "delete its folder (if it also holds runs: version_* in it)" in advice
    assert "pin" not in advice
    assert "link" not in advice


def test_one_size_for_a_run(folder):
    """Also with results, files of a save that was never committed, damage, and a branch."""
    run = Run(folder / "b")
    run.add_metrics(20, {"accuracy": 0.5})
    train_branch(LocalStore(folder / "a"), start=20, last_step=40)
    shutil.copytree(folder / "a/version_60", folder / "a/version_80")
    os.unlink(folder / "a/version_80" / MANIFEST)
    flip_bit(LocalStore(folder / "a"), f"version_40/{MANIFEST}")
    for name, found in list_runs(folder).items():
        versions = run_cli("ls", folder / name, "--json").json["versions"]
        assert found["bytes"] == sum(version["bytes"] for version in versions)
