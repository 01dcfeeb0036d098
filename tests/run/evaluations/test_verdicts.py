"""Verdicts on versions: who distrusts what, and which versions are skipped and kept for it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet import events
from limpet.errors import (
    Denied,
    FormatError,
    LimpetError,
    NoSnapshot,
    NotFound,
    NotTrusted,
    StoreError,
)
from limpet.format.names import Version
from limpet.format.records import Verdict
from limpet.run.address import open_version
from limpet.run.evaluations import metrics
from limpet.run.evaluations.trust import trust_of
from limpet.run.policy import EverySteps, KeepBest, KeepEvery, KeepLast
from limpet.run.run import Run
from limpet.snapshot.snapshot import reader_of
from limpet.storage.memory import MemoryStore
from tests.forging import seal, sealed_content
from tests.trainings import flip_bit, shard_of, state_after, train, trained_run, training
from tests.unreliable_stores import HookedStore


@pytest.fixture
def store() -> MemoryStore:
    """Return a run with versions 20, 40, and 60, each with the metric ``loss``."""
    return trained_run()


@pytest.fixture
def skipped() -> Iterator[list[tuple[str, str]]]:
    """Record what is skipped, and why."""
    found: list[tuple[str, str]] = []

    def sink(name: str, fields: dict[str, Any]) -> None:
        if name == "skipped":
            found.append((fields["version"], f"{fields['error']}"))

    with events.attach(sink):
        yield found


def latest(store: Any, trust: Any = "not-distrusted") -> int | None:
    snapshot, _ = Run(store).newest(lambda s: None, trust=trust)
    return None if snapshot is None else snapshot.step


def trust(store: MemoryStore, step: int) -> str | None:
    run = Run(store)
    return trust_of(
        run.catalog.evaluations.read(Version(step), reader_of(run.open(Version(step))).digest)
    )


def verdict_files(store: MemoryStore, step: int) -> list[str]:
    return sorted(s.key for s in store.list(f"version_{step}") if s.key.endswith(".verdict.json"))


def test_a_distrusted_version_is_never_the_latest(
    store: MemoryStore, skipped: list[tuple[str, str]]
) -> None:
    run = Run(store)
    run.attest(60, ok=False, by="sdc-replay", note="step 58\ndiffers")
    assert latest(store) == open_version_step(store, "latest") == 40
    assert skipped[-1][0] == "version_60"
    assert "sdc-replay does not trust it: step 58 differs." in skipped[-1][1]
    assert open_version_step(store, "60") == 60, "a version that is named is opened"
    assert run.newest(lambda s: None, at=60)[0] is not None
    assert limpet.load(store.at("version_60"))["progress"]
    run.attest(40, ok=True, by="sdc-replay")
    assert (trust(store, 20), trust(store, 40), trust(store, 60)) == (
        None, "attested", "distrusted",
    )  # fmt: skip


def open_version_step(store: MemoryStore, address: str) -> int | None:
    with mock.patch("limpet.run.address.Run", return_value=Run(store)):
        return open_version(f"memory://verdicts@{address}").step


def test_one_negative_verdict_of_any_author_counts_until_that_author_withdraws_it(
    store: MemoryStore,
) -> None:
    run = Run(store)
    run.attest(60, ok=False, by="sdc-replay")
    run.attest(60, ok=True, by="ann")
    run.attest(60, ok=True, by="ann")
    assert trust(store, 60) == "distrusted"
    assert latest(store) == 40
    run.attest(60, ok=True, by="sdc-replay", note="the replay itself was wrong")
    assert trust(store, 60) == "attested"
    assert latest(store) == latest(store, "attested") == 60
    run.attest(60, ok=False, by="ann")
    assert latest(store) == 40
    assert len(verdict_files(store, 60)) == 5, "a stored verdict never changes"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(-9, 9)), max_size=12))
@settings(max_examples=40)
def test_the_last_verdict_of_each_author_counts_whatever_the_clocks_say(
    verdicts: list[tuple[str, bool, int]],
) -> None:
    store = MemoryStore()
    limpet.save(store.at("version_20"), {"x": 1}, step=20)
    last: dict[str, bool] = {}
    for author, ok, days in verdicts:
        with mock.patch.object(metrics, "datetime", wraps=datetime) as clock:
            clock.now.side_effect = lambda zone, days=days: datetime.now(UTC) + timedelta(days=days)
            Run(store).attest(20, ok=ok, by=author)
        last[author] = ok
    expected = "distrusted" if not all(last.values()) else "attested" if last else None
    assert trust(store, 20) == expected


def test_trust_attested_accepts_only_versions_with_a_positive_verdict(
    store: MemoryStore, skipped: list[tuple[str, str]]
) -> None:
    run = Run(store)
    with pytest.raises(NoSnapshot) as caught:
        latest(store, "attested")
    assert "version_60: It has no verdict; version_40: It has no verdict; version_20" in str(
        caught.value
    )
    assert "limpet attest RUN STEP --ok" in str(caught.value)
    run.attest(20, ok=True, by="ann")
    skipped.clear()
    assert latest(store, "attested") == 20
    assert [v for v, _ in skipped] == ["version_60", "version_40"]
    assert latest(store) == 60
    assert Run(store).newest(lambda s: None, at=20, trust="attested")[0] is not None
    with pytest.raises(NoSnapshot, match="has no intact and trusted version of step 40"):
        Run(store).newest(lambda s: None, at=40, trust="attested")
    with pytest.raises(LimpetError, match='"not-distrusted", for all'):
        latest(store, "ok")


def test_a_run_in_which_every_version_is_distrusted_says_so(store: MemoryStore) -> None:
    for snapshot in Run(store).snapshots():
        Run(store).attest(snapshot, ok=False, by="nan", note=f"loss at {snapshot.step}")
    for find in (lambda: Run(store).latest(), lambda: open_version_step(store, "latest")):
        with pytest.raises(NoSnapshot) as caught:
            find()
        assert "no intact and trusted version" in str(caught.value)
        assert "version_60: nan does not trust it: loss at 60; version_40" in str(caught.value)
        assert "resume(at=STEP) continues from a version whatever" in str(caught.value)
        assert caught.value.skipped == ("version_60", "version_40", "version_20")
    assert Run(store).best("loss") is None


def test_the_error_of_a_long_run_lists_only_some_versions() -> None:
    store = trained_run(15, 1)
    with pytest.raises(NoSnapshot, match="and 6 more") as caught:
        latest(store, "attested")
    assert len(str(caught.value)) < 1200


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", range(0, 300, 23))
@pytest.mark.parametrize("ok", [True, False])
def test_a_verdict_with_a_flipped_bit_is_never_a_positive_one(
    store: MemoryStore, skipped: list[tuple[str, str]], ok: bool, byte: int
) -> None:
    Run(store).attest(60, ok=ok, by="sdc", note="x" * 90)
    [file] = verdict_files(store, 60)
    flip_bit(store, file, byte)
    assert trust(store, 60) == "distrusted"
    assert latest(store) == latest_after_more_verdicts(store) == 40
    assert file in [key for key, _ in skipped]
    assert f"A verdict of sdc on it cannot be read ({file})" in skipped[-1][1]
    store.delete(file)
    assert latest(store) == 60
    assert trust(store, 60) == "attested"


def latest_after_more_verdicts(store: MemoryStore) -> int | None:
    Run(store).attest(60, ok=True, by="sdc")
    Run(store).attest(60, ok=True, by="ann")
    return latest(store)


@pytest.mark.parametrize("raw", [b"", b"{}", b"no JSON", b"x" * (1 << 20) + b"x"])
def test_any_file_with_the_name_of_a_verdict_distrusts(store: MemoryStore, raw: bytes) -> None:
    store.put_if_absent("version_60/eval-x.000000000000.verdict.json", raw)
    assert latest(store) == 40
    store.put_if_absent("version_40/eval-x.000000000000.failed.json", raw)
    store.put_if_absent("version_40/eval-x.000000000000.verdict.json.partial", raw)
    assert latest(store) == 40, "other records are no verdicts"


def test_a_verdict_of_a_later_format_distrusts(store: MemoryStore) -> None:
    Run(store).attest(60, ok=True, by="sdc")
    [file] = verdict_files(store, 60)
    content = sealed_content(store.get(file, 1 << 20))
    store.delete(file)
    store.put_if_absent(file, seal({**content, "format": 99}))
    assert latest(store) == 40


def test_a_verdict_that_was_moved_or_renamed_says_nothing(store: MemoryStore) -> None:
    Run(store).attest(60, ok=False, by="sdc")
    [file] = verdict_files(store, 60)
    raw = store.get(file, 1 << 20)
    store.put_if_absent(file.replace("version_60", "version_40"), raw)
    store.put_if_absent(file.replace("version_60/eval-sdc", "version_40/eval-ann"), raw)
    assert trust(store, 40) is None
    assert latest(store) == 40


@pytest.mark.parametrize("error", [Denied("no access"), StoreError("EIO")])
def test_a_verdict_that_the_store_does_not_return_is_never_ignored(
    store: MemoryStore, error: StoreError
) -> None:
    Run(store).attest(60, ok=True, by="sdc")

    def before(name: str, key: str) -> None:
        if key.endswith(".verdict.json") and name.startswith("get"):
            raise error

    hooked = HookedStore(store)
    hooked.before = before
    if isinstance(error, Denied):  # the version may be intact and trusted: not an older one
        with pytest.raises(Denied):
            latest(hooked)
    else:
        assert latest(hooked) == 40


# -- what a verdict is about ---------------------------------------------------------------------


def test_a_verdict_on_a_replaced_snapshot_is_refused_and_an_old_one_says_nothing(
    store: MemoryStore,
) -> None:
    run, snapshot = Run(store), Run(store).open(Version(60))
    run.attest(snapshot, ok=False, by="sdc")
    for stat in list(store.list("version_60")):
        if "/eval-" not in stat.key:
            store.delete(stat.key)
    limpet.save(store.at("version_60"), state_after(1), step=60)
    assert trust(store, 60) is None
    assert latest(store) == 60
    with pytest.raises(FormatError, match="not the snapshot that was evaluated"):
        run.attest(snapshot, ok=True, by="sdc")
    assert len(verdict_files(store, 60)) == 1


def test_arguments_and_versions_that_do_not_exist(store: MemoryStore) -> None:
    run, before = Run(store), [s.key for s in store.list("")]
    for ok in (1, None, "yes", 0):
        with pytest.raises(LimpetError, match="Invalid value for ok="):
            run.attest(60, ok=ok, by="x")  # type: ignore[arg-type]
    for note in (None, b"x", "x" * 16_385, "\ud800"):
        with pytest.raises(LimpetError, match="Invalid value for note="):
            run.attest(60, ok=True, by="x", note=note)  # type: ignore[arg-type]
    for by in ("", "a b", "../x", "x.y", "x" * 65, None):
        with pytest.raises(LimpetError, match="not a valid name"):
            run.attest(60, ok=True, by=by)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no version of step 50"):
        run.attest(50, ok=True, by="x")
    with pytest.raises(NotFound):
        run.attest(Version(61), ok=True, by="x")
    with pytest.raises(LimpetError, match="a Snapshot, a Version, or a step"):
        run.attest("60", ok=True, by="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        run.attest(60, False, "x")  # type: ignore[misc]
    assert [s.key for s in store.list("")] == before


def test_a_verdict_is_deleted_with_its_version_and_changes_no_metric(store: MemoryStore) -> None:
    run = Run(store)
    before = run.metrics(20)
    run.attest(20, ok=False, by="sdc", note="é" * 16_384)
    assert run.metrics(20) == before
    [verdict] = run.catalog.evaluations.read(
        Version(20), reader_of(run.open(Version(20))).digest
    ).of(Verdict)
    assert verdict.note == "é" * 16_384
    assert len(str(NotTrusted("x", found=latest(store)))) < 100
    run.delete(20)
    assert list(store.list("version_20")) == []


# -- the best, and retention ---------------------------------------------------------------------


def test_a_distrusted_version_is_never_the_best(
    store: MemoryStore, skipped: list[tuple[str, str]]
) -> None:
    run = Run(store)
    for step, value in ((20, 0.3), (40, 0.1), (60, 0.2)):
        run.add_metrics(step, {"val": value})
    run.attest(40, ok=False, by="sdc")
    best = run.best("val")
    assert best is not None
    assert best.step == 60
    assert [v for v, _ in skipped] == ["version_40"]
    assert run.metrics(40)["val"] == 0.1
    records = run.records()
    assert [r.metrics.get("val") for r in records] == [0.3, None, 0.2]
    assert [r.is_distrusted for r in records] == [False, True, False]
    assert KeepBest(1, "other", unscored=2).keep(records[:2]) == {Version(20)}
    assert run.retain(KeepLast(1) | KeepBest(1, "val")) == [Version(20), Version(40)]


def test_retention_keeps_the_newest_trusted_version(store: MemoryStore) -> None:
    run = Run(store)
    run.attest(60, ok=False, by="sdc")
    assert run.retain(KeepLast(1)) == [Version(20)]
    assert run.line() == [Version(40), Version(60)]
    assert latest(store) == 40
    run.attest(40, ok=False, by="sdc")
    assert run.retain(KeepLast(1)) == [Version(40)], "no version is trusted"


def test_the_newest_trusted_version_that_is_kept_is_intact(store: MemoryStore) -> None:
    Run(store).attest(60, ok=False, by="sdc")
    store.delete(shard_of(store, "version_40"))
    assert Run(store).retain(KeepLast(1)) == []
    assert latest_intact(store) == 20


def latest_intact(store: MemoryStore) -> int | None:
    found = Run(store).latest()
    return None if found is None else found.step


@given(
    bad=st.sets(st.sampled_from([10, 20, 30, 40, 50, 60])),
    lost=st.sets(st.sampled_from([10, 20, 30, 40, 50, 60])),
    attested=st.sets(st.sampled_from([10, 20, 30, 40, 50, 60])),
    policy=st.sampled_from([KeepLast(1), KeepLast(2), KeepEvery(30), KeepBest(1, "loss")]),
)
@settings(max_examples=80)
def test_retention_never_deletes_what_a_resume_would_load(
    bad: set[int], lost: set[int], attested: set[int], policy: Any
) -> None:
    store = trained_run(60, 10)
    for step in bad:
        Run(store).attest(step, ok=False, by="sdc")
    for step in lost:
        store.delete(shard_of(store, f"version_{step}"))
    for step in attested:
        Run(store).attest(step, ok=True, by="ann")
    good = {10, 20, 30, 40, 50, 60} - bad - lost
    Run(store).retain(policy)
    if good & attested:
        found, _ = Run(store).newest(lambda s: reader_of(s).check_files(), trust="attested")
        assert found is not None
        assert found.step == max(good & attested)
    if good:
        assert latest_intact(store) == max(good)
    else:
        with pytest.raises(NoSnapshot):
            latest_intact(store)


def test_retention_of_a_training_keeps_the_newest_attested_version() -> None:
    store = MemoryStore()
    with training(store, EverySteps(10), KeepLast(2)) as (state, ckpt):
        for last in (10, 20, 30, 40, 50, 60):
            train(state, ckpt, last)
            ckpt.wait()
            if last in (20, 30):
                Run(store).attest(last, ok=True, by="sdc")
    assert [v.step for v in Run(store).line()] == [30, 50, 60]
    assert latest(store, "attested") == 30
    Run(store).attest(50, ok=True, by="sdc")
    assert Run(store).retain(KeepLast(2)) == [Version(30)]


# -- costs ---------------------------------------------------------------------------------------


def test_only_the_verdicts_of_the_versions_that_are_tried_are_read() -> None:
    store = MemoryStore()
    limpet.save(store.at("version_1"), {"x": 1}, step=1)
    for step in range(2, 301):
        for stat in list(store.list("version_1")):
            name = stat.key.partition("/")[2]
            store.put_if_absent(f"version_{step}/{name}", store.get(stat.key, 1 << 20))
        store.put_if_absent(f"version_{step}/eval-x.000000000000.verdict.json", b"")
    for step in (299, 300):  # the only ones that are what their names say
        for stat in list(store.list(f"version_{step}")):
            store.delete(stat.key)
        limpet.save(store.at(f"version_{step}"), {"x": 1}, step=step)
    Run(store).attest(300, ok=False, by="sdc")
    touched: list[str] = []
    hooked = HookedStore(store)
    hooked.before = lambda name, key: touched.append(f"{name} {key}")
    assert latest(hooked) == 299
    folders = {text.partition("version_")[2].partition("/")[0] for text in touched} - {""}
    assert folders == {"299", "300"}
