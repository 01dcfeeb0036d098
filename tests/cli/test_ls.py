"""``limpet ls``."""

from math import inf, nan

import pytest

from limpet.errors import Denied
from limpet.format.names import MANIFEST, Version, random_id, shard_name
from limpet.run.catalog import Catalog
from limpet.run.run import Run
from tests.cli.invoke import run_cli, train_branch
from tests.trainings import damage_version, flip_bit


def test_lists_all_versions_oldest_first(run):
    result = run_cli("ls", run)
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines()]
    assert [r[0] for r in rows if r[0].isdecimal()] == ["20", "40", "60"]
    assert "latest" in next(line for line in result.out.splitlines() if line.startswith("  60"))
    assert "loss" in result.out
    assert "not checked" in result.out


def test_json_keys_are_stable(run):
    report = run_cli("ls", run, "--json").json
    assert list(report) == [
        "run", "latest", "branch", "versions", "branches", "orphans", "contained_runs",
        "bytes_checked",
    ]  # fmt: skip
    assert list(report["versions"][0]) == [
        "version", "url", "step", "branch", "on_line", "latest", "created", "bytes",
        "referred_bytes", "reason", "metrics", "evaluations", "pinned",
        "intact", "problem",
    ]  # fmt: skip
    assert report["latest"] == "version_60"
    assert [v["step"] for v in report["versions"]] == [20, 40, 60]
    assert all(v["intact"] and v["bytes"] > 4000 for v in report["versions"])
    assert report["versions"][0]["reason"] == "cadence"
    assert isinstance(report["versions"][0]["metrics"]["loss"], float)
    assert report["bytes_checked"] is False


def test_abandoned_versions_are_listed_and_marked(store):
    train_branch(store, start=40, last_step=60)
    report = run_cli("ls", store.url, "--json").json
    assert [(v["version"], v["on_line"]) for v in report["versions"]] == [
        ("version_20", True), ("version_40", True), ("version_60", False), ("version_60.1", True),
    ]  # fmt: skip
    assert report["latest"] == "version_60.1"
    assert report["branches"][0] == {
        "number": 1,
        "from": "version_40",
        "reason": "on request",
        "created": report["branches"][0]["created"],
        "problem": None,
    }
    result = run_cli("ls", store.url)
    assert "abandoned" in result.out
    assert "branch 1 starts at version_40" in result.out
    columns = [line.split()[:2] for line in result.out.splitlines()[2:6]]
    assert columns == [["20", "0"], ["40", "0"], ["60", "0"], ["60", "1"]], "limpet rm RUN 60.0"


def test_the_sizes_add_up_and_are_what_rm_frees(store):
    Run(store).add_metrics(20, {"val": 2.0})
    Run(store).add_metrics(40, {"val": 1.0})
    store.put_if_absent(f"version_40/{shard_name(0, 1, random_id())}", b"12345")
    flip_bit(store, f"version_20/{MANIFEST}")
    report = run_cli("ls", store.url, "--json").json
    sizes = {v["version"]: v["bytes"] for v in report["versions"]}
    stored = sum(s.length for s in store.list("") if s.key.startswith("version_"))
    assert report["orphans"] == {"files": 1, "bytes": 5}
    assert sum(sizes.values()) + 5 == stored
    for version, orphaned in (("version_20", 0), ("version_40", 5)):
        deleted = run_cli("rm", f"{store.url}/{version}", "--json").json
        assert deleted["bytes"] == sizes[version] + orphaned
    shown = run_cli("show", f"{store.url}@60", "--json").json
    checked = run_cli("verify", f"{store.url}@60", "--json").json
    assert shown["bytes"] < checked["bytes"] < sizes["version_60"]  # shards; and indexes; all


@pytest.mark.parametrize("damage", ["manifest", "short", "missing"])
def test_damaged_versions_are_listed_and_not_the_latest(store, damage):
    damage_version(store, "version_60", damage)
    report = run_cli("ls", store.url, "--json").json
    assert [v["intact"] for v in report["versions"]] == [True, True, False]
    assert report["latest"] == "version_40"
    assert report["versions"][2]["problem"]["message"]
    assert report["versions"][2]["bytes"] > 0
    result = run_cli("ls", store.url)
    assert result.code == 0
    assert "damaged" in result.out
    assert "version_60:" in result.out


def test_a_run_without_any_intact_version(store):
    for step in (20, 40, 60):
        flip_bit(store, f"version_{step}/{MANIFEST}")
    assert "No version on the current lineage is intact" in run_cli("ls", store.url).out
    assert run_cli("ls", store.url, "--json").json["latest"] is None


def test_a_damaged_branch_record_is_reported(store):
    train_branch(store, start=40, last_step=60)
    flip_bit(store, "branch-1.json")
    assert run_cli("ls", store.url, "--json").json["branches"][0]["problem"]
    assert "branch 1:" in run_cli("ls", store.url).out


def test_metrics_come_from_evaluations(store):
    Run(store).add_metrics(Version(40), {"loss": 0.125, "worst": float("nan")})
    report = run_cli("ls", store.url, "--json").json
    assert report["versions"][1]["metrics"] == {"loss": 0.125, "worst": "nan"}
    assert report["orphans"]["files"] == 0
    assert "loss 0.125, worst nan" in run_cli("ls", store.url).out


def plots_of(place, *metrics):
    options = [word for metric in metrics for word in ("--plot", metric)]
    lines = run_cli("ls", place, *options).out.splitlines()
    return [
        " ".join(line.split()) for line in lines if any(b in line for b in "\u2581\u2588\u00b7")
    ]


def test_a_plot_is_a_line_of_blocks_for_each_metric(empty_url):
    values = [0.0, 1.0, nan, 3.5, -inf, 7.0, 8.0]
    with Run(empty_url).writer() as writer:
        for step, value in enumerate(values, 1):
            metrics = {"loss": value, "half": value / 2, "odd": nan}
            writer.save({"n": 1}, step=step, metrics=metrics if step > 1 else {"loss": value})
    assert plots_of(empty_url, "loss", "half") == [
        "loss \u2581\u2582\u00b7\u2584\u00b7\u2588\u2588 0 to 8, steps 1 to 7",
        "half \u2581\u00b7\u2583\u00b7\u2587\u2588 0.5 to 4, steps 2 to 7",
    ]
    assert plots_of(empty_url, "odd") == [
        "odd \u00b7\u00b7\u00b7\u00b7\u00b7\u00b7 not finite, steps 2 to 7"
    ]
    assert "none" in run_cli("ls", empty_url, "--plot", "none").out
    assert "no version has this metric" in run_cli("ls", empty_url, "--plot", "none").out
    assert run_cli("ls", empty_url, "--plot", "loss", "--json").json["latest"] == "version_7"


def test_plots_of_runs_of_extreme_values_and_of_many_versions(empty_url):
    for name in ("a", "b"):
        with Run(f"{empty_url}/{name}").writer() as writer:
            for step in range(1, 101):
                metrics = {"x": float(step), "y": -1.7e308 if step < 50 else 1.7e308}
                writer.save({"n": 1}, step=step, metrics=metrics)
    found = plots_of(empty_url, "x", "y")
    assert [line.split()[:2] for line in found] == [["a", "x"], ["b", "x"], ["a", "y"], ["b", "y"]]
    assert all(len(line.split()[2]) == 50 for line in found)
    assert found[0].endswith("\u2588 1 to 100, steps 1 to 100")
    assert {*found[2].split()[2]} == {"\u2581", "\u2588"}


def test_orphans_are_counted(store):
    for folder in ("version_60", "version_80"):
        store.put_if_absent(f"{folder}/{shard_name(0, 1, random_id())}", b"x" * 10)
    assert run_cli("ls", store.url, "--json").json["orphans"] == {"files": 2, "bytes": 20}
    assert "2 files (20 B) that no manifest names" in run_cli("ls", store.url).out


def test_an_unreadable_version_is_listed(store, monkeypatch):
    real = Catalog.open

    def fail(self, version):
        if version.step == 60:
            raise Denied("Cannot read version_60")
        return real(self, version)

    monkeypatch.setattr(Catalog, "open", fail)
    result = run_cli("ls", store.url)
    assert result.code == 0
    assert "unreadable" in result.out


@pytest.mark.parametrize("columns", [20, 44, 60, 80, 400])
def test_only_metrics_are_cut_short_on_a_narrow_terminal(store, monkeypatch, columns):
    train_branch(store, start=40, last_step=60)
    run = Run(store)
    run.pin(20)
    for version in run.listing().versions:
        run.add_metrics(version, {f"a_long_name_{n}": n for n in range(9)})
    monkeypatch.setattr(
        "limpet.cli.verbs.ls.format_age", lambda created: "1 s"
    )  # the same in both calls
    monkeypatch.setenv("COLUMNS", "400")
    head, *rows = run_cli("ls", store.url).out.splitlines()[1:6]
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = run_cli("ls", store.url).out.splitlines()[1:6]
    at = head.index("metrics")
    assert narrow[0] == head
    for row, narrow_row in zip(rows, narrow[1:], strict=True):
        assert narrow_row[:at] == row[:at]
        assert len(narrow_row) <= max(columns, at + len("metrics"))
        assert narrow_row == row or narrow_row.endswith("\u2026")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "ls", "RUN"], ["ls", "--json", "RUN"], ["ls", "RUN", "--json"],
        ["--json", "ls", "RUN", "--json"],
    ],
)  # fmt: skip
def test_json_may_be_anywhere(run, arguments):
    result = run_cli(*[run if a == "RUN" else a for a in arguments])
    assert (result.code, result.err) == (0, "")
    assert [v["step"] for v in result.json["versions"]] == [20, 40, 60]
    assert run_cli("ls", run).out.startswith(run)  # it does not stay on
