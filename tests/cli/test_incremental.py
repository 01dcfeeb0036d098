"""Commands on incremental versions report references, verify them once, and copy all data."""

import threading

import numpy as np
import pytest

import limpet as hf
from limpet.buffers import shared_pool
from limpet.format.names import MANIFEST, Version
from limpet.format.records import Branch, encode_record
from limpet.loading.snapshot import reader_of
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli
from tests.forging import seal, sealed_content
from tests.trainings import flip_bit, leave_from, shard_of
from tests.unreliable_stores import HookedStore


@pytest.fixture
def store(empty_url):
    """Return a run whose versions 2 and 3 refer to the full version 1."""
    store = open_store(empty_url)
    for step in (1, 2, 3):
        save(store, step)
    return store


def save(store, step, **other_values):
    """Save an incremental version based on the previous one."""
    state = {"frozen": np.arange(20_000.0), "adapter": np.full(10, float(step)), **other_values}
    location = Location(store, f"version_{step}")
    base = hf.Run(store).catalog.open(Version(step - 1)) if step > 1 else None
    metadata = VersionMetadata(step=step)
    job = begin_save(location, state, metadata, shared_pool(), stage_now=False, base=base)
    finish_save(job)


def test_ls_reports_own_and_referred_bytes(store):
    versions = run_cli("ls", store.url, "--json").json["versions"]
    assert [v["referred_bytes"] for v in versions] == [0, 160_000, 160_000]
    assert all(4096 + 80 < v["bytes"] < 10_000 for v in versions[1:])  # indexes and manifests, too
    out = run_cli("ls", store.url).out
    assert "own" in out
    assert "referred" in out
    assert out.count("156 KiB") == 2
    alone = "memory://cli-ls-of-full-versions"
    hf.save(f"{alone}/version_1", {"n": 1})
    assert "referred" not in run_cli("ls", alone).out


def test_show_reports_own_and_referred_bytes_and_bases(store):
    report = run_cli("show", f"{store.url}/version_3", "--json").json
    assert report["bytes"] == 4096 + 80
    assert report["referred_bytes"] == 160_000
    assert report["bases"] == ["version_1"]
    assert report["chain"] == 2
    result = run_cli("show", f"{store.url}/version_3")
    assert "156 KiB in version_1" in result.out
    full = run_cli("show", f"{store.url}/version_1", "--json").json
    assert (full["referred_bytes"], full["bases"], full["chain"]) == (0, [], 0)
    assert "refers to" not in run_cli("show", f"{store.url}/version_1").out


def test_verify_names_every_version_that_a_damaged_base_affects(store):
    flip_bit(store, shard_of(store, "version_1"), byte=5000)
    result = run_cli("verify", store.url, "--json")
    assert result.code == 3
    versions = result.json["versions"]
    assert [v["ok"] for v in versions] == [False, False, False]
    problems = [p for v in versions for p in v["problems"]]
    assert {p["file"] for p in problems} == {shard_of(store, "version_1")}
    assert [tuple(p["leaves"]) for p in problems] == [("frozen",)] * 3
    assert [p["fields"].get("base") for p in problems] == [None, "version_1", "version_1"]
    text_result = run_cli("verify", store.url)
    assert "problems in 3 of 3 versions" in text_result.out
    assert text_result.out.count(f"{shard_of(store, 'version_1')}, byte ") == 1
    assert "also affects version_2, version_3\n" in text_result.out
    assert text_result.out.count("is damaged between bytes") == 1


@pytest.mark.parametrize("deleted", [False, True])
def test_verify_distinguishes_two_problems_of_one_file(store, deleted):
    save(store, 4, more=np.arange(9000.0))
    save(store, 5, more=np.arange(9000.0))
    if deleted:
        store.delete(shard_of(store, "version_1"))
    else:
        flip_bit(store, shard_of(store, "version_1"), byte=5000)
        flip_bit(store, shard_of(store, "version_1"), byte=4)
    flip_bit(store, shard_of(store, "version_4"), byte=5000)
    text_result = run_cli("verify", store.url)
    assert text_result.out.count("also affects version_2, version_3, version_4, version_5\n") == 1
    assert text_result.out.count("also affects version_5\n") == 1
    if not deleted:  # damage of the header affects no other version
        assert text_result.out.count(f"{shard_of(store, 'version_1')}, byte ") == 2
    assert "problems in 5 of 5 versions" in text_result.out


def branch_without_versions(store):
    """End the lineage in a branch without versions that starts at a deleted version."""
    leave_from(hf.Run(store), hf.Run(store).open(Version(1)), Version(1), "on request")
    flip_bit(store, f"version_1/{MANIFEST}")


def branch_in_newer_format(store):
    leave_from(hf.Run(store), hf.Run(store).open(Version(2)), Version(2), "on request")
    raw = store.get("branch-1.json", 1 << 20)
    store.delete("branch-1.json")
    store.put_if_absent("branch-1.json", seal(sealed_content(raw), 99))


def branch_from_deleted_version(store):
    leave_from(hf.Run(store), hf.Run(store).open(Version(1)), Version(1), "on request")
    store.delete(f"version_1/{MANIFEST}")


def branch_from_itself(store):
    record = Branch(1, "version_2.1", "0" * 32, "2026-01-01T00:00:00+00:00", "")
    store.put_if_absent("branch-1.json", encode_record(record))


@pytest.mark.parametrize(
    "damage",
    [
        branch_without_versions,
        branch_in_newer_format,
        branch_from_deleted_version,
        branch_from_itself,
    ],
)
def test_verify_reports_all_problems_although_the_lineage_is_unknown(store, damage):
    damage(store)
    flip_bit(store, shard_of(store, "version_3"), byte=-1)
    report = run_cli("verify", store.url, "--json")
    assert report.code == 3
    assert shard_of(store, "version_3") in [
        p["file"] for v in report.json["versions"] for p in v["problems"]
    ]


def continue_run(store, steps):
    """Save one more version, as a training that is still running does."""
    state = {"frozen": np.arange(20_000.0), "adapter": np.zeros(10), "p": hf.Progress()}
    state["p"].step = steps - 1
    with hf.Checkpointer(store, state, incremental=True) as ckpt:
        ckpt._saver.resume_from(reader_of(hf.Run(store).open(Version(steps - 1))))
        ckpt._lifecycle.is_resumed = True  # it started before the damage
        ckpt.step()
        return ckpt.save()


def test_a_save_refers_to_no_version_in_which_verify_has_found_damage(store):
    flip_bit(store, shard_of(store, "version_1"), byte=5000)
    assert continue_run(store, 4).bases == {Version(1)}  # the lengths are unchanged
    assert run_cli("verify", store.url).code == 3
    saved = continue_run(store, 5)
    assert saved.bases == frozenset()
    assert saved.verify().ok
    assert continue_run(store, 6).bases == {Version(5)}


def state_of(step):
    return {"frozen": np.arange(20_000.0), "adapter": np.full(10, step)}


@pytest.mark.parametrize(
    "keep", [hf.KeepLast(1), hf.KeepLast(2), hf.KeepBest(1, "loss", mode="min")]
)
@pytest.mark.parametrize("when", ["between saves", "in a save"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_training_never_loses_its_last_intact_version(at, when, keep):
    """Bytes of its newest version change on the disk, and `limpet verify` finds that."""
    inner = open_store(f"memory://damaged-base-{at}-{when[0]}-{hash(str(keep))}")
    store, state = HookedStore(inner), state_of(0)

    def find_damage():
        flip_bit(inner, shard_of(inner, f"version_{at}"))
        assert run_cli("verify", inner.url).code == 3

    def find_in_save(method, key):
        if (method, key) == ("put_if_absent", f"version_{at + 1}/manifest.json"):
            find_damage()

    with hf.Checkpointer(
        store, state, save=hf.EverySteps(1), incremental=3, keep=keep, preemption=None
    ) as ckpt:
        for step in range(1, 8):
            if step == at + 1 and when == "between saves":
                find_damage()
            elif step == at + 1:
                store.before = find_in_save
            state.update(state_of(step))
            ckpt.step({"loss": -step})
            ckpt.wait()
            if step != at + 1 or when == "between saves":
                assert any(s.verify().ok for s in hf.Run(inner).snapshots()), step
    live = state_of(0)
    assert hf.Checkpointer(inner, live, incremental=3).resume().step == 7
    assert live["adapter"][0] == 7


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("record", ["of the base", "unreadable"])
def test_damage_of_an_older_version_counts_for_those_that_refer_to_it(record, restarts):
    """`limpet verify RUN@2` records about version 2 only, whose file others refer to."""
    store = open_store(f"memory://older-base-{record[0]}-{restarts}")
    rng, frozen = np.random.default_rng(0), np.arange(20_000.0)

    def save(step):
        state = {"frozen": rng.random(20_000) if step == 1 else frozen, "adapter": np.full(9, step)}
        return writer.save(state, step=step)

    def sessions(*steps):
        return [[step] for step in steps] if restarts else [steps]

    with hf.Run(store).writer(keep=hf.KeepLast(3), incremental=20) as writer:
        for step in (1, 2, 3):
            saved = save(step)
        assert saved.bases == {Version(2)}
        flip_bit(store, shard_of(store, "version_2"))
        assert run_cli("verify", f"{store.url}@2").code == 3
        if record == "unreadable":
            (key,) = [s.key for s in store.list("version_2") if ".verified." in s.key]
            flip_bit(store, key)
        for step in (4, 5) if not restarts else ():
            save(step)
    for step in (4, 5) if restarts else ():
        with hf.Run(store).writer(keep=hf.KeepLast(3), incremental=20) as writer:
            save(step)
    intact = {s.step for s in hf.Run(store).snapshots() if s.verify().ok}
    assert intact >= {4, 5}, intact


def test_no_step_waits_for_a_look_at_the_records():
    """A save looks at them in the background."""
    inner, threads = open_store("memory://records-in-background"), set()
    store = HookedStore(inner)

    def note(method, key):
        if method.startswith("list") and key.startswith("version_"):
            threads.add(threading.current_thread().name)

    store.before = note
    state = state_of(0)
    with hf.Checkpointer(
        store, state, save=hf.EverySteps(1), incremental=True, keep=hf.KeepLast(2), preemption=None
    ) as ckpt:
        for step in range(1, 6):
            state.update(state_of(step))
            ckpt.step()
            ckpt.wait()
        assert threads == {"limpet-save"}


def test_nothing_is_deleted_after_a_save_that_refers_to_damage():
    """It was found while the save was in progress. The next one is full."""
    inner = open_store("memory://damage-in-a-save")
    store, state = HookedStore(inner), state_of(0)

    def find(method, key):
        if (method, key) == ("put_if_absent", "version_3/manifest.json"):
            flip_bit(inner, shard_of(inner, "version_2"))
            assert run_cli("verify", f"{inner.url}@2").code == 3

    keep, losses, intact = hf.KeepBest(1, "loss"), [5, 9, 1, 2], list[list[int]]()
    with hf.Checkpointer(
        store, state, save=hf.EverySteps(1), incremental=9, keep=keep, preemption=None
    ) as ckpt:
        for step, loss in enumerate(losses, 1):
            state["frozen"] = state["frozen"] + (step == 2)  # 2 is full, and 3 refers to it
            store.before = find
            ckpt.step({"loss": loss})
            ckpt.wait()
            intact.append([s.step for s in hf.Run(inner).snapshots() if s.verify().ok])
    assert intact == [[1], [1, 2], [1], [4]]


def test_a_copy_is_self_contained(store):
    to = "memory://cli-copies-of-increments"
    result = run_cli("copy", store.url, to, "--json")
    assert result.code == 0
    copied = [s["snapshot"] for s in result.json["copied"]]
    assert copied == [f"{to}/version_{n}" for n in (1, 2, 3)]
    again = run_cli("copy", store.url, to, "--json")
    assert (again.code, again.json["copied"], len(again.json["present"])) == (0, [], 3)
    assert run_cli("copy", f"{store.url}/version_3", f"{to}-of-one/version_3").code == 0
    assert hf.load(f"{to}-of-one/version_3")["frozen"][5] == 5.0
    store.delete(shard_of(store, "version_1"))
    for step in (1, 2, 3):
        assert hf.load(f"{to}/version_{step}")["adapter"].tolist() == [float(step)] * 10
        assert hf.open(f"{to}/version_{step}").bases == frozenset()
    assert run_cli("verify", to).code == 0


def test_evaluations_of_incremental_versions_apply_to_their_copies(store):
    to = "memory://cli-evaluated-increments"
    hf.Run(store).add_metrics(2, {"val": 0.5})
    for _ in range(2):
        assert run_cli("copy", store.url, to, "--json").json["evaluations"] == 1
        assert hf.Run(to).best("val").step == 2
    assert run_cli("verify", to).code == 0


def test_files_copied_by_other_tools_are_not_copied_again(store):
    other = open_store("memory://cli-increments-by-rsync")
    for stat in store.list(""):
        other.put_if_absent(stat.key, store.get(stat.key, 1 << 30))
    result = run_cli("copy", store.url, other.url, "--json")
    assert result.code == 0
    assert result.json["copied"] == []
    assert len(result.json["present"]) == 3


@pytest.mark.parametrize("step", [1, 3])
def test_a_damaged_manifest_can_be_replaced_although_others_refer_to_its_files(store, step):
    """The version may be incremental. Its shard has a different name in the full copy."""
    to = f"memory://cli-healed-from-copies-{step}"
    for stat in [*store.list("version_3")]:
        store.delete(stat.key)
    for each in (3, 4):
        save(store, each, more=np.arange(30_000.0))
    assert hf.Run(store).open(Version(4)).bases == {Version(1), Version(3)}
    run_cli("copy", store.url, to)
    flip_bit(store, f"version_{step}/{MANIFEST}")
    result = run_cli("copy", to, store.url)
    assert result.code == 8
    assert f"Move its {MANIFEST} away, and nothing else" in result.err
    store.delete(f"version_{step}/{MANIFEST}")
    assert run_cli("copy", to, store.url).code == 0
    assert run_cli("verify", store.url).code == 0
    assert run_cli("copy", to, store.url, "--json").json["copied"] == []
    hf.Run(store).sweep(grace=0)
    assert run_cli("verify", store.url).code == 0
