"""Failed saves, damaged versions, and what a training with tables does then."""

import errno

import pytest
import torch

import limpet
from limpet import tables
from limpet.errors import (
    LimpetError,
    NoSpace,
    NotFound,
    SaveFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
)
from limpet.format.names import MANIFEST
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.testing.faults import Fault, FaultFs
from tests.cli.invoke import run_cli
from tests.tables.contents import differing, live, saved
from tests.trainings import delete_version, flip_bit, shard_of
from tests.unreliable_stores import HookedStore

WORDS = tables.Table("words", 4, optimizer=tables.Adagrad(0.1), admit_after=2)
USERS = tables.Table("users", 3, optimizer=tables.SGD(0.1), dtype="bfloat16")


class Training:
    """Servers of two tables whose rows change at each step, and what they had after each step."""

    def __init__(self, store, count=2, **options):
        self.servers = tables.Servers([WORDS, USERS], count)
        self.found = {}
        options = {"save": limpet.EverySteps(1), "incremental": True, **options}
        self.failures = []
        self.expected = (LimpetError, SaveFailed) if options.get("on_error") == "warn" else ()
        self.ckpt = limpet.Checkpointer(store, {"tables": self.servers}, **options)

    def __enter__(self):
        self.ckpt.__enter__()
        self.resumed = self.ckpt.resume()
        return self

    def __exit__(self, *exception):
        return self.ckpt.__exit__(*exception)

    def step(self):
        """Change 12 rows, or nearly all in the first two steps."""
        number = self.ckpt.current_step + 1
        for name in ("words", "users"):
            ids = range(300) if number <= 2 else range(number * 10, number * 10 + 12)
            tables.Embedding(self.servers, name)(torch.tensor([*ids])).sum().backward()
        self.servers.step()
        self.found[number] = live(self.servers)
        try:
            self.ckpt.step()
            self.ckpt.wait()
        except self.expected as e:
            self.failures.append((number, type(e)))


def restored(version):
    servers = tables.Servers(
        [WORDS, tables.Table("users", 3, optimizer=tables.SGD(0.1), dtype="bfloat16")]
    )
    version.load({"tables": servers})
    return live(servers)


def check_versions(store, found, steps=None):
    """Each version has the rows of its step, and the newest is of the last step."""
    versions = Run(store).snapshots()
    for version in versions:
        assert not differing(saved(version), found[version.step])
    assert not differing(restored(versions[-1]), found[versions[-1].step])
    if steps is not None:
        assert [version.step for version in versions] == steps


# -- saves that fail -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_after_a_failed_save_the_next_one_has_all_that_changed(when):
    """Each call of the store in an incremental save fails in turn, or its reply is lost."""
    store, calls = HookedStore(MemoryStore()), []
    with Training(store, on_error="warn", incremental=7) as training:
        for at in range(100):

            def fail(method, key, at=at):
                calls.append(method)
                if len(calls) == at:
                    raise StoreError("a fault")

            training.step()
            calls.clear()
            setattr(store, when, fail)
            training.step()
            setattr(store, when, lambda method, key: None)
            if len(calls) < at:
                break
        training.step()
    assert 10 < at < 99
    check_versions(store, training.found)
    failed = {step for step, _ in training.failures}
    assert len(failed) > 5
    steps = {version.step for version in Run(store).snapshots()}
    assert training.found.keys() - failed <= steps


@pytest.mark.slow
def test_after_a_full_disk_the_next_version_has_all_that_changed(tmp_path):
    fs = FaultFs()
    with Training(LocalStore(str(tmp_path), fs=fs), on_error="warn", incremental=7) as training:
        for at in range(1, 200, 5):
            training.step()
            fs.faults, fs.fired = [Fault(at=fs.counts.total() + at, error=errno.ENOSPC)], []
            training.step()
            fs.faults = []
            if not fs.fired:
                break
        training.step()
    assert 10 < at < 199
    check_versions(LocalStore(str(tmp_path)), training.found)
    failed = {step for step, _ in training.failures}
    assert len(failed) > 5
    steps = {version.step for version in Run(tmp_path).snapshots()}
    assert training.found.keys() - failed <= steps


def test_a_failed_save_is_raised_and_the_training_resumes_exactly():
    store = HookedStore(MemoryStore())

    def full(method, key):
        if method == "write_at" and "version_3" in key:
            raise NoSpace("the disk is full")

    store.before = full
    with pytest.raises(NoSpace), Training(store) as training:
        for _ in range(4):
            training.step()
    store.before = lambda method, key: None
    with Training(store, count=3) as again:
        assert again.resumed.step == 2
        assert not differing(live(again.servers), training.found[2])
        again.step()
        assert not differing(again.found[3], training.found[3])


def test_after_an_unknown_outcome_the_next_version_has_all_that_changed():
    store = HookedStore(MemoryStore())

    def lose(method, key):
        if method == "put_if_absent" and key.endswith(f"version_3/{MANIFEST}"):
            raise Unavailable("no answer")

    with Training(store, on_error="warn") as training:
        training.step()
        training.step()
        store.after = lose
        training.step()
        store.after = lambda method, key: None
        training.step()
        training.step()
    check_versions(store, training.found, [1, 2, 3, 4, 5])


# -- damage --------------------------------------------------------------------------------------


def trained(steps=6, store=None, **options):
    store = MemoryStore() if store is None else store
    with Training(store, **options) as training:
        for _ in range(steps):
            training.step()
    return store, training.found


def test_a_flipped_bit_in_an_old_segment_makes_a_resume_fall_back():
    """To the newest version that does not refer to it."""
    store, found = trained()
    assert [version.chain for version in Run(store).snapshots()] == [0, 0, 1, 2, 3, 4]
    flip_bit(store, shard_of(store, "version_4"), byte=-3)
    with pytest.warns(SkippedVersion), Training(store, count=3) as training:
        assert training.resumed.step == 3
        assert not differing(live(training.servers), found[3])
        training.step()
        assert not differing(training.found[4], found[4])
    check_versions(store, found, [1, 2, 3, 4])


@pytest.mark.parametrize("byte", [-1, -1000, -5000, -20_000])
def test_a_flipped_bit_anywhere_in_the_base_is_found(byte):
    store, found = trained()
    flip_bit(store, shard_of(store, "version_2"), byte=byte)
    with pytest.warns(SkippedVersion), Training(store) as training:
        assert training.resumed.step == 1
        assert not differing(live(training.servers), found[1])


def test_a_truncated_and_a_missing_shard():
    """EDL does not test: a missing shard, a truncated file."""
    store, found = trained()
    for step in (6, 5):
        key = shard_of(store, f"version_{step}")
        raw = store.get(key, 1 << 30)
        store.delete(key)
        if step == 6:
            store.put_if_absent(key, raw[:-1])
    with pytest.warns(SkippedVersion), Training(store) as training:
        assert training.resumed.step == 4
        assert not differing(live(training.servers), found[4])


def test_shards_of_another_version_and_shards_that_no_version_names():
    """EDL does not test: unequal versions, an extra shard."""
    store, found = trained()
    old, new = shard_of(store, "version_5"), shard_of(store, "version_6")
    store.put_if_absent("version_6/shard-00000-of-00001.abcdef.safetensors.tmp", b"x")
    store.put_if_absent("version_6/shard-00001-of-00002.abcdef012345.safetensors", b"extra")
    with Training(store, save=limpet.Never()) as training:
        assert training.resumed.step == 6
        assert not differing(live(training.servers), found[6])
    store.delete(new)
    store.put_if_absent(new, store.get(old, 1 << 30))
    with pytest.warns(SkippedVersion), Training(store, save=limpet.Never()) as training:
        assert training.resumed.step == 5
        assert not differing(live(training.servers), found[5])


def test_a_deleted_base_makes_a_resume_fall_back():
    store, found = trained()
    delete_version(store, 2)
    with pytest.warns(SkippedVersion), Training(store) as training:
        assert training.resumed.step == 1
        assert not differing(live(training.servers), found[1])


def test_a_base_that_is_deleted_during_the_training():
    """The save that would refer to it fails, and the next one is full."""
    store = MemoryStore()
    with Training(store, on_error="warn") as training:
        for _ in range(4):
            training.step()
        delete_version(store, 4)
        training.step()
        training.step()
    assert training.failures == [(5, NotFound)]
    versions = Run(store).snapshots()
    assert versions[-1].step == 6
    assert not differing(restored(versions[-1]), training.found[6])
    assert versions[-1].verify().ok


def test_a_base_that_verify_has_found_damaged_is_not_referred_to():
    store = open_store("memory://damaged-base")
    with Training(store) as training:
        for _ in range(4):
            training.step()
        flip_bit(store, shard_of(store, "version_2"), byte=-1)
        assert run_cli("verify", store.url).code == 3
        training.step()
        training.step()
    assert training.failures == []
    intact = [version for version in Run(store).snapshots() if version.verify().ok]
    assert [version.step for version in intact][-2:] == [5, 6]
    for version in intact:
        assert not differing(restored(version), training.found[version.step])


# -- commands and retention ----------------------------------------------------------------------


@pytest.mark.slow
def test_verify_copy_and_diff(tmp_path):
    _, found = trained(store=open_store(str(tmp_path / "run")))
    run = tmp_path / "run"
    assert run_cli("verify", run).code == 0
    assert run_cli("copy", f"{run}@6", tmp_path / "copy").code == 0
    assert not differing(restored(limpet.open(tmp_path / "copy")), found[6])
    assert run_cli("diff", f"{run}@6", tmp_path / "copy").code == 0
    assert run_cli("diff", f"{run}@5", f"{run}@6").code == 7
    flip_bit(open_store(str(run)), shard_of(open_store(str(run)), "version_4"), byte=-1)
    result = run_cli("verify", run)
    assert result.code == 3
    assert "version_4" in result.out + result.err


@pytest.mark.slow
def test_retention_keeps_the_files_of_carried_segments():
    store, found = trained(12, keep=limpet.KeepLast(2))
    versions = Run(store).snapshots()
    assert [version.step for version in versions][-2:] == [11, 12]
    for version in versions[-2:]:
        assert version.verify().ok
        assert not differing(restored(version), found[version.step])


@pytest.mark.slow
def test_five_versions_apart_and_three_kept(tmp_path):
    """B 1, 2, 5: due at multiples only; each in a folder of its own; 90, 95, and 100 are kept."""
    servers = tables.Servers([WORDS])
    look_up, found = tables.Embedding(servers, "words"), {}
    with limpet.Checkpointer(
        tmp_path, {"tables": servers}, save=limpet.EverySteps(5), keep=limpet.KeepLast(3)
    ) as ckpt:
        ckpt.resume()
        for step in range(1, 101):
            look_up(torch.tensor([step, step - 1])).sum().backward()
            servers.step()
            found[step] = live(servers)
            ckpt.step()
    folders = [path for path in tmp_path.iterdir() if path.name.startswith("version_")]
    assert sorted(path.name for path in folders) == ["version_100", "version_90", "version_95"]
    for path in folders:
        assert len([*path.glob("*.safetensors")]) == 1
        assert not differing(saved(limpet.open(path)), found[int(path.name[8:])])


def test_saving_can_be_disabled(tmp_path):
    """B 1."""
    servers = tables.Servers([WORDS])
    with limpet.Checkpointer(tmp_path, {"tables": servers}, save=limpet.Never()) as ckpt:
        ckpt.resume()
        for _ in range(3):
            ckpt.step()
    assert not Run(tmp_path).snapshots()


def test_no_version(tmp_path):
    """B 8."""
    servers = tables.Servers([WORDS])
    for url in (tmp_path / "none", tmp_path / "none@latest"):
        with pytest.raises(LimpetError):
            limpet.load(url, into={"tables": servers})
    (tmp_path / "file").write_text("x")
    with pytest.raises(LimpetError):
        limpet.load(tmp_path / "file", into={"tables": servers})
