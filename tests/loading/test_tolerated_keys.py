"""missing=, unexpected=, and mismatched= of a load and a resume tolerate differences by key."""

from typing import Any

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import LimpetError, MissingLeaf, PlanError, ShapeMismatch, UnexpectedLeaf
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup


@pytest.mark.parametrize("missing", ["error", "keep"])
def test_keys_that_only_the_live_state_has_are_named_before_leniency_is_advised(missing):
    """What was saved as "model" is loaded into "net"."""
    store, live = MemoryStore(), {"net": {"w": [0]}}
    limpet.save(store, {"model": {"w": [1]}, "history": [], "state": {}})
    with pytest.raises(limpet.errors.MissingLeaf, match=r"No leaf of .*rename=\{OLD: NEW\}"):
        limpet.load(store, into=live, keys="net", missing=missing)
    with pytest.raises(limpet.errors.MissingLeaf, match="No leaf of"):
        limpet.load(store, into=live, keys="modle/**", missing=missing)
    limpet.load(store, into=live, keys="net", rename={"model": "net"})
    assert live == {"net": {"w": [1]}}


def full(value, *shape):
    return torch.full(shape or (2,), float(value))


@pytest.fixture
def saved(tmp_path):
    state = {"model": {"a": full(1), "b": full(1)}, "old": {"c": full(1)}, "other": full(1)}
    return limpet.save(tmp_path / "version_1", state)


def live_state(**extra):
    model = {"a": full(0), "b": full(0)}
    return {"model": model, "old": {"c": full(0)}, "other": full(0), **extra}


def test_missing_keys_that_match_are_kept(saved):
    live = live_state(status={"epoch": full(7), "best": full(8)}, ema=full(9))
    report = limpet.load(saved, into=live, missing=["status/**", "ema"])
    assert [*report.kept] == ["status/epoch", "status/best", "ema"]
    assert live["status"]["epoch"].tolist() == [7, 7]
    assert live["model"]["a"].tolist() == [1, 1]


def test_all_others_are_errors_and_nothing_changes(saved):
    live = live_state(status={"epoch": full(7)}, ema=full(9), ema2=full(9))
    with pytest.raises(MissingLeaf, match="2 missing in the snapshot: ema, ema2") as raised:
        limpet.load(saved, into=live, missing=["status/**"])
    assert raised.value.fields["missing"] == ("ema", "ema2")
    assert live["model"]["a"].tolist() == [0, 0]
    with pytest.raises(MissingLeaf, match="1 missing in the snapshot: ema2"):
        limpet.load(saved, into=live, missing=("status", "ema"))


def test_the_error_after_a_list_of_patterns_names_those_that_lack(saved):
    def advice(live, **options):
        with pytest.raises(LimpetError) as raised:
            limpet.load(saved, into=live, **options)
        return str(raised.value).partition("as needed: ")[2]

    live = live_state(b={"c": full(7), "d": full(7)}, ema=full(9))
    assert advice(live) == 'missing="keep".'
    assert advice(live, missing=["zz/**"]) == 'missing=[..., "b", "ema"].'
    assert advice(live, missing=["zz/**"], unexpected=["a"]) == 'missing=[..., "b", "ema"].'
    limpet.load(saved, into=live, missing=["zz/**", "b", "ema"])
    part = {"model": {"a": full(0)}, "other": full(0, 3)}
    found = advice(part, unexpected=["zz/**"], mismatched=["zz/**"])
    assert 'unexpected=[..., "model/b", "old/c"], mismatched=[..., "other"].' in found
    limpet.load(saved, into=part, unexpected=["model/b", "old/c"], mismatched=["other"])
    many = advice(live_state(**{f"k{i}": full(0) for i in range(30)}), missing=["zz"])
    assert many.endswith('"k19", and 10 more].')


def test_the_key_of_an_object_stands_for_all_keys_below_it(saved):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    live = live_state(optimizer=optimizer, progress=limpet.Progress())
    report = saved.load(into=live, missing=["optimizer/**", "progress/**"])
    assert {key.partition("/")[0] for key in report.kept} == {"optimizer", "progress"}
    with pytest.raises(MissingLeaf, match="progress"):
        saved.load(into=live, missing=["optimizer/**"])


def test_unexpected_keys_that_match_are_ignored(saved):
    live = live_state()
    del live["old"], live["model"]["b"]
    report = limpet.load(saved, into=live, unexpected=["old/**", "model/b"])
    assert [*report.ignored] == ["model/b", "old/c"]
    with pytest.raises(UnexpectedLeaf, match="1 unexpected in the snapshot: model/b"):
        limpet.load(saved, into=live, unexpected=["old/**"])


def test_mismatched_keys_that_match_are_kept(saved):
    live = live_state()
    live["model"]["a"], live["other"] = full(5, 3), full(5, 3)
    report = limpet.load(saved, into=live, mismatched=["model/*", "other"])
    assert {*report.kept} == {"model/a", "other"}
    with pytest.raises(ShapeMismatch, match="1 with a different shape: other"):
        limpet.load(saved, into=live, mismatched=["model/*"])
    del live["old"]
    live["new"] = full(0)
    with pytest.raises(PlanError, match=r"1 missing.*: new.* 1 unexpected.*: old/c") as raised:
        limpet.load(
            saved, into=live, mismatched=["model/*", "other"], missing=["x"], unexpected=["y"]
        )
    assert raised.value.fields["misfits"] == ()


def make_training(classes):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, classes))
    optimizer = torch.optim.Adam(model.parameters())
    return model, {"optimizer": optimizer, "model": model}


def test_the_slots_of_a_parameter_are_kept_with_it(tmp_path):
    model, state = make_training(4)
    model(torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    snapshot = limpet.save(tmp_path / "version_1", state)
    _, state = make_training(5)
    report = snapshot.load(into=state, mismatched=["model/1.*"])
    assert {key.partition("/")[0] for key in report.kept} == {"model", "optimizer"}
    _, state = make_training(5)
    with pytest.raises(ShapeMismatch, match=r"1 with a different shape: model/1\.bias"):
        snapshot.load(into=state, mismatched=["model/1.weight"])
    # the parameters are not loaded, so that nothing says that their slots may be kept
    with pytest.raises(ShapeMismatch, match="slot"):
        snapshot.load(into=state, keys="optimizer", mismatched=["model/**"])
    snapshot.load(into=state, keys="optimizer", mismatched=["optimizer/**"])


def test_a_dict_of_plain_values_keeps_members_that_match(tmp_path):
    snapshot = limpet.save(tmp_path / "version_1", {"w": full(1), "config": {"lr": 1}})
    live: dict[str, Any] = {"w": full(0), "config": {"lr": 2, "warmup": 3, "decay": 4}}
    snapshot.load(into=live, missing=["config/warmup"])
    assert live["config"] == {"lr": 1, "warmup": 3}


@pytest.mark.parametrize("option", ["missing", "unexpected", "mismatched"])
def test_arguments_are_checked_first(saved, tmp_path, option):
    for bad in ("status/**", "Keep", "", None, True, [1], {"a"}, {"a": 1}, full(1), ["a", None]):
        with pytest.raises(LimpetError, match=rf'{option}= must be "error", "\w+", or a list of p'):
            limpet.load(saved, into=live_state(), **{option: bad})
        with pytest.raises(LimpetError, match=f"{option}= must be"):
            limpet.Checkpointer(tmp_path / "run", live_state()).resume(start=saved, **{option: bad})
    assert limpet.load(saved, into=live_state(), **{option: []}).is_exact


def test_a_list_that_is_empty_is_strict(saved, tmp_path):
    with pytest.raises(MissingLeaf):
        limpet.load(saved, into=live_state(ema=full(1)), missing=[])
    run = limpet.save(tmp_path / "run" / "version_5", live_state(), step=5)
    with limpet.Checkpointer(tmp_path / "new", live_state()) as ckpt:
        ckpt.resume(start=run, missing=[])
        assert ckpt.current_step == 5


def test_a_resume_of_the_own_version_keeps_what_matches(tmp_path):
    run = tmp_path / "run"
    with limpet.Checkpointer(run, {"w": full(1)}) as ckpt:
        ckpt.step()
    live = {"w": full(0), "train_status": {"epoch": full(3)}, "ema": full(4)}
    with limpet.Checkpointer(run, live) as ckpt, pytest.raises(MissingLeaf, match="ema"):
        ckpt.resume(missing=["train_status/**"])
    found: list[str] = []
    with (
        limpet.attach(lambda name, fields: name == "loaded" and found.append(fields["summary"])),
        limpet.Checkpointer(run, live) as ckpt,
    ):
        ckpt.resume(missing=["train_status/**", "ema"])
        assert ckpt.current_step == 1
    assert "kept 2 missing in the snapshot: train_status/epoch, ema" in found[0]
    assert (live["w"].tolist(), live["ema"].tolist()) == ([1, 1], [4, 4])


def test_one_rank_may_lack_what_another_one_has(tmp_path):
    run = tmp_path / "version_1"
    limpet.save(run, {"w": full(1)})
    states = [{"w": full(0)}, {"w": full(0), "ema": full(2)}]
    with FakeGroup(2) as group:
        errors = group.outcomes(lambda rank: limpet.load(run, into=states[rank], missing=["x"]))
    assert all(isinstance(error, MissingLeaf) for error in errors)
    with FakeGroup(2) as group:
        group.run(lambda rank: limpet.load(run, into=states[rank], missing=["ema"]))
    assert [state["w"].tolist() for state in states] == [[1, 1], [1, 1]]
