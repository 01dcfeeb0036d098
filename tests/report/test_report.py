"""``limpet report``: what the page shows is true, complete, escaped, and bounded."""

import re
import time
from datetime import datetime
from math import inf, nan

import numpy as np
import pytest

import limpet
from limpet.format.names import MANIFEST, METRICS_LOG
from limpet.report import data, html
from limpet.report.data import Series
from limpet.report.svg import draw_plot
from limpet.run.policy import EverySteps
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import check_error_line, make_run, run_cli
from tests.forging import seal, sealed_content
from tests.report.pages import (
    Page,
    check_nothing_is_clipped,
    drawings,
    hold,
    make_huge,
    many_versions,
    report,
)
from tests.trainings import damage_version, delete_version, flip_bit, initial_state, shard_of, train

HOSTILE = "<script>alert(1)</script>\u202e\u200f&\"'" + "x" * 10_000


@pytest.fixture
def folder(tmp_path):
    make_run(LocalStore(tmp_path / "a"))
    return tmp_path / "a"


def save(store, state, step=1, **options):
    with limpet.Run(store).writer() as writer:
        return writer.save(state, step=step, **options)


def test_every_section_shows_what_is_recorded(tmp_path):
    store = LocalStore(tmp_path / "a")

    def run_until(last_step, at=None, **config):
        state = {**initial_state(), "frozen": np.ones(100_000)}
        keep = limpet.KeepLast(20) | limpet.KeepBest(1, "val")
        with limpet.Checkpointer(
            store, state, save=EverySteps(20), keep=keep, incremental=True, config=config
        ) as ckpt:
            ckpt.resume(at=at) if at else ckpt.resume()
            train(state, ckpt, last_step)

    run_until(60, lr=0.1)
    run_until(60, at=40, lr=0.01)
    flip_bit(store, shard_of(store, "version_60.1"))
    with pytest.warns(limpet.errors.SkippedVersion):
        run_until(80, lr=0.01)
    run = limpet.Run(store)
    run.add_metrics(40, {"val": 0.25}, name="job")
    run.add_metrics(60, {"val": 0.5}, name="job")
    run.pin(20)
    page = report(tmp_path / "a")
    found = page.sections()
    assert "newest version version_80.2" in found["Summary"]
    assert "6, of which 2 are abandoned and 1 damaged" in found["Summary"]
    assert "val 0.25 (min) in version_40" in found["Summary"]
    listed = run_cli("ls", store.url, "--json").json["versions"]
    own, referred = (sum(v[name] for v in listed) for name in ("bytes", "referred_bytes"))
    assert referred
    assert f"{own / (own + referred):.0%} of what full saves would store" in found["Summary"]
    assert f"not checked; to check them: limpet verify {store.url}" in found["Summary"]
    assert "finished" in found["Summary"]
    assert "branch 1 starts at version_40 (on request)" in found["Lineage"]
    assert "branch 2 starts at version_40 (1 newer damaged)" in found["Lineage"]
    for mark in ("version_60: abandoned", "version_60.1: damaged", "version_20: ok, pinned",
                 "version_40: ok, best", "version_80.2: latest"):  # fmt: skip
        assert mark in found["Lineage"]
    assert "loss abandoned training" in found["Metrics"]
    assert "val evaluated" in found["Metrics"]
    assert "Metrics exist only at saved versions." in found["Metrics"]
    assert "abandoned a full save stored" in found["Bytes per save"]
    assert "lr 0.01" in found["Config"]
    assert "lr 0.1 -> 0.01" in found["Config"]
    assert "weights array float32 [1000] 3.91 KiB" in found["Contents of the newest version"]
    assert "A resume skipped version_60.1 as damaged" in found["Versions"]
    assert "ok, pinned" in found["Versions"]
    for drawing in drawings(page):
        assert drawing.title
        assert drawing.text
        check_nothing_is_clipped(drawing)
    [loss] = [drawing for drawing in drawings(page) if drawing.title == "loss"]
    assert loss.text.count("at step 20 to") == 1
    assert "prefers-color-scheme: dark" in page.html


def test_goodput_is_the_share_of_the_time_that_was_trained(folder):
    manifest = folder / "version_60" / MANIFEST
    content = sealed_content(manifest.read_bytes())
    began = datetime.fromisoformat(content["created"]).timestamp() - 200
    content["metadata"]["dict"]["training"]["dict"] |= {"began": began, "trained_seconds": 50.0}
    manifest.write_bytes(seal(content))
    assert "goodput 25.0% of the time since it began" in report(folder).text


def test_verify_reads_all_bytes(folder):
    assert "were read and compared" in report(folder, "--verify").sections()["Summary"]
    flip_bit(LocalStore(folder), shard_of(LocalStore(folder), "version_60"))
    assert "0 damaged" in report(folder).sections()["Summary"]
    found = report(folder, "--verify").sections()
    assert "1 damaged" in found["Summary"]
    assert "newest version version_40" in found["Summary"]
    assert "1 damaged" in report(folder).sections()["Summary"], "it is recorded, as by verify"


def test_json_has_the_page(folder):
    found = run_cli("report", folder, "--json").json
    assert list(found) == ["runs", "html"]
    assert "version_60" in Page(found["html"]).text


def test_a_place_without_a_run(tmp_path):
    check_error_line(run_cli("report", tmp_path / "none"), 4, "There is no run at")
    check_error_line(run_cli("report", tmp_path, "--stats-bytes", "x"), 2, "is not a size")


def test_no_version(tmp_path):
    (tmp_path / "version_20").mkdir()
    found = report(tmp_path).sections()
    assert "newest version none is intact" in found["Summary"]
    assert found["Lineage"] == "There is no version."


def test_one_version_is_visible(tmp_path):
    save(tmp_path, {"x": np.arange(3)}, step=20, metrics={"loss": 0.5})
    page = report(tmp_path)
    for title in ("loss", "KiB per save"):
        [drawing] = [drawing for drawing in drawings(page) if drawing.title == title]
        assert re.search(r'<path class="dots s0 solid" d="M[0-9.]+ [0-9.]+h0"/>', drawing.svg)
        assert ">20</text>" in drawing.svg


@pytest.mark.slow
def test_ten_thousand_versions(tmp_path):
    many_versions(tmp_path, 10_000)
    began = time.process_time()
    page = report(tmp_path)
    assert time.process_time() - began < 5
    assert len(page.html) < 2_000_000
    assert "10,000, of which 0" in page.text
    assert f"9,700 older ones: limpet ls {tmp_path}" in page.sections()["Versions"]
    assert page.sections()["Lineage"].count("version_") < 300
    assert "1 at step 1 to 0.0001 at step 10000" in drawings(page)[2].text


def test_a_long_config_is_cut_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "_MAX_LINES", 2)
    for step in range(1, 5):
        config = {"step": step, "a": 1, "b": 2, "c": 3}
        with limpet.Checkpointer(str(tmp_path), {"x": 1}, config=config) as ckpt:
            ckpt.resume()
            ckpt.step({})
    found = report(tmp_path).sections()["Config"]
    assert f"step 4 a 1 2 more: limpet show {tmp_path} Changes version_3: step 2 -> 3" in found
    assert found.endswith("version_4: step 3 -> 4 1 older changes are not shown.")


def test_a_line_of_few_of_many_points_ends_at_the_last_one():
    points = [(step, step * 3 % 7) for step in range(1001)]
    with_last, without = (
        draw_plot([Series(0, "saved", "solid", shown)], "loss", "")
        for shown in (points, points[:-1])
    )
    assert with_last != without


@pytest.mark.slow
@pytest.mark.parametrize(("branches", "metrics"), [(3000, 1), (24, 40)])
def test_ten_thousand_versions_on_many_branches(tmp_path, branches, metrics):
    many_versions(tmp_path, 10_000, branches, [f"m{i}" for i in range(metrics)])
    began = time.process_time()
    page = report(tmp_path)
    assert time.process_time() - began < 5
    assert len(page.html) < 2_000_000
    assert f"branch {branches} starts at version_1 (on request)" in page.sections()["Lineage"]
    cut = "Of abandoned branches, the newest 24 are drawn." in page.sections()["Metrics"]
    assert cut == (branches == 3000)
    assert page.html.count('class="line s0 abandoned"') < 24 * (metrics + 4) + 5


ODD = {"nan": nan, "inf": inf, "large": 1e300, "huge": -1.7e308, "tiny": 5e-324, "zero": 0.0}


def test_metrics_that_are_hard_to_draw(tmp_path):
    for step, scale in ((1, 1.0), (2, -1.0), (3, 0.5), (4, 1.0)):
        metrics = {name: value * scale for name, value in ODD.items()}
        if step == 3:
            metrics = {"<script>": 1.0, HOSTILE: nan, "once": 1.7e308}
        save(tmp_path, {"x": np.arange(3)}, step=step, metrics=metrics)
    page = report(tmp_path)
    found = page.sections()["Metrics"]
    assert found.count("No value is finite.") == 3
    assert "NaN or infinite: 3" in found
    assert "<script>" in found
    assert "\u202e" not in page.text
    assert "x" * 100 not in found
    for drawing in drawings(page):
        check_nothing_is_clipped(drawing)


def test_texts_of_a_run_are_escaped_and_cut(tmp_path):
    place = tmp_path / "<b>&\u202e"
    note = {HOSTILE: HOSTILE}
    state = {HOSTILE: np.arange(3), "text": HOSTILE, "ok": 1}
    with limpet.Checkpointer(str(place), state, config={HOSTILE: HOSTILE}) as ckpt:
        ckpt.step({HOSTILE: 1.0})
    save(place, state, step=2, note=note)
    page = report(place)
    assert len(page.html) < 60_000
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert not {"\u202e", "\u200f"} & set(page.text)
    assert "x" * 700 not in page.html


@pytest.mark.parametrize("damage", ["manifest", "short", "missing", "newer"])
@pytest.mark.parametrize("version", ["version_40", "version_60"])
def test_a_damaged_or_newer_version_is_shown_as_such(folder, version, damage):
    if damage == "newer":
        manifest = folder / version / MANIFEST
        manifest.write_bytes(seal(sealed_content(manifest.read_bytes()), format_number=99))
    else:
        damage_version(LocalStore(folder), version, damage)
    found = report(folder).sections()
    assert "1 damaged" in found["Summary"]
    assert ("too new" if damage == "newer" else "damaged") in found["Versions"]
    assert ("version_60" if version == "version_40" else "version_40") in found["Summary"]
    assert "weights" in found["Contents of the newest version"]
    assert "loss" in found["Metrics"]


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("step", [40, 60])
def test_a_version_that_is_deleted_while_it_is_read(step, reads, monkeypatch):
    """Before its manifest is read for the list, or for the contents."""
    store = make_run(open_store(f"memory://report-{step}-{reads}"))
    read, count = MemoryStore.get, 0

    def delete(self, key, limit):
        nonlocal count
        count += key == f"version_{step}/{MANIFEST}"
        if count == reads and key.endswith(MANIFEST):
            delete_version(store, step)
        return read(self, key, limit)

    monkeypatch.setattr(MemoryStore, "get", delete)
    page = report(store.url)
    assert count >= reads
    found = page.sections()
    assert (f"version_{step} 20" in found["Versions"]) == (reads == 2)
    if (step, reads) == (60, 2):
        assert "no snapshot at" in found["Contents of the newest version"]
    else:
        assert "weights" in found["Contents of the newest version"]


def test_two_runs_share_plots(tmp_path):
    for name, metrics in (("a", ("loss", "lr")), ("b", ("loss", "acc"))):
        for step in (1, 2):
            save(tmp_path / name, {"x": step}, step=step, metrics=dict.fromkeys(metrics, 1 / step))
    page = report(tmp_path / "a", tmp_path / "b")
    found = page.sections()
    titles = [drawing.title for drawing in drawings(page)]
    assert [t for t in titles if t in ("loss", "lr", "acc")] == ["loss", "lr", "acc"]
    assert "loss a: training b: training" in found["Metrics"]
    assert {"s0", "s1"} <= set(re.findall(r"\bs\d", page.html))
    for section in ("Lineage", "Config", "Versions"):
        assert f">{section}</h2><h3>a</h3>" in page.html


def test_the_metrics_of_every_step_are_drawn_if_they_were_logged(tmp_path):
    for until, at in ((60, None), (50, 20)):
        state = {"x": np.arange(3), "progress": limpet.Progress()}
        with limpet.Checkpointer(
            str(tmp_path), state, save=EverySteps(20), metrics_log=True
        ) as ckpt:
            ckpt.resume(at=at) if at else ckpt.resume()
            while state["progress"].step < until:
                ckpt.step({"loss": 1.0 / (state["progress"].step + 1)})
    page = report(tmp_path)
    assert "loss abandoned training" in page.sections()["Metrics"]
    assert "Values between versions" in page.text
    [drawing] = [drawing for drawing in drawings(page) if drawing.title == "loss"]
    [line] = re.findall(r'class="line s0 solid" d="([^"]*)"', drawing.svg)
    assert line.count("L") == 49
    assert "training: 1 at step 1 to 0.02 at step 50" in drawing.text
    for step in (20, 40):  # only some versions have it
        limpet.Run(tmp_path).add_metrics(step, {"val": 1.0}, name="job")
    for step in (1, 2):
        save(tmp_path / "b", {"x": 1}, step=step, metrics={"loss": 1.0})
    both = report(tmp_path, tmp_path / "b")
    assert re.search("val [^ ]*: evaluated", both.sections()["Metrics"])
    assert 'class="line s1 solid"' in both.html, "the run without a log has a line"
    damaged = next((tmp_path / METRICS_LOG).iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert f"{METRICS_LOG}/{damaged.name} is damaged" in report(tmp_path).text


def test_a_tensor_of_100_gb_is_read_by_blocks(tmp_path):
    make_huge(tmp_path / "version_1")
    found = report(tmp_path).sections()["Contents of the newest version"]
    assert "big array float32 [25000000000] 93.1 GiB 0 0 0 histogram 0 0 0.07% n 1" in found


def test_a_store_that_does_not_send_the_contents(monkeypatch):
    store = make_run(open_store("memory://report-slow"))
    answers = hold(monkeypatch, "get_range")
    monkeypatch.setattr(data, "READ_SECONDS", 0.2)
    found = report(store.url).sections()
    answers.set()
    assert "has not sent the contents of version_60" in found["Contents of the newest version"]
    assert "version_60" in found["Versions"]
    assert "limpet show" not in report(store.url, "--stats-bytes", 0).text
