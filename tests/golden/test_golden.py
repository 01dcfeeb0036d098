"""Every build reads the golden files, and finds the same values."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import limpet
from limpet.format.names import Version
from limpet.loading.snapshot import reader_of
from tests.forging import values_equal
from tests.golden import make

GOLDEN = Path(__file__).parent / "format-1"
LINEAGE = [Version(1), Version(2, 1), Version(3, 1)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:ComplexHalf", "ignore:Sparse invariant"
)


@pytest.fixture
def run(tmp_path: Path) -> limpet.Run:
    """Return a copy, because tests must not write to the golden files."""
    return limpet.Run(str(shutil.copytree(GOLDEN / "branches", tmp_path / "run")))


def loaded_state(step: int) -> dict[str, object]:
    """Return the state as ``limpet.load`` returns it without live objects."""
    state = make.state(step)
    model, optimizer = state["model"], state["optimizer"]
    weights = model.state_dict()
    names = {p: f"model.{n}" for n, p in model.named_parameters()}
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    state["progress"] = {"epoch": 0, "step": step, "samples": 0}
    state["model"] = dict(weights)
    state["optimizer"] = {
        "state": {names[p]: dict(slots) for p, slots in optimizer.state.items()},
        "groups": [{**group, "params": list(names.values())}],
    }
    state["scaled"] = inner_tensors(state["scaled"])
    state["nested"] = [inner_tensors(state["nested"][0])]
    return state


def inner_tensors(scaled: make.Scaled) -> dict[str, object]:
    """Return a tensor of another class as it is loaded without a live tensor."""
    codes = scaled.codes
    return {
        "class": "tests.golden.make.Scaled",
        "dtype": torch.float32,
        "shape": torch.Size([2, 3]),
        "context": {"bits": scaled.bits, "dtype": torch.float32},
        "tensors": {
            "codes": inner_tensors(codes) if isinstance(codes, make.Scaled) else codes,
            "scale": scaled.scale,
        },
    }


def test_lineage_and_abandoned_version_are_found(run: limpet.Run) -> None:
    assert run.line() == LINEAGE
    assert run.listing().versions == sorted([*LINEAGE, Version(2)])
    assert run.read_branch(1).from_version == "version_1"
    latest = run.latest()
    assert latest is not None
    assert latest.version == Version(3, 1)
    assert reader_of(latest).manifest.parent is not None
    assert reader_of(latest).manifest.parent.version == "version_2.1"
    assert latest.metadata["metrics"] == {"loss": 1 / 3}


@pytest.mark.parametrize("version", [Version(1), Version(2), *LINEAGE[1:]], ids=str)
def test_every_version_is_intact_and_contains_its_values(run: limpet.Run, version: Version) -> None:
    snapshot = run.open(version)
    report = snapshot.verify()
    assert report.ok, report.problems
    found, expected = limpet.load(snapshot.url), loaded_state(version.step)
    assert found.keys() == expected.keys()
    for name in expected:
        assert values_equal(found[name], expected[name]), (name, found[name], expected[name])
    assert found["tied"][0] is found["model"]["weight"]


def test_a_live_state_resumes_from_the_golden_run(run: limpet.Run) -> None:
    live, expected = make.state(0), make.state(3)
    with limpet.Checkpointer(run.url, live) as ckpt:
        resumed = ckpt.resume()
    assert resumed is not None
    assert values_equal(dict(live["model"].state_dict()), dict(expected["model"].state_dict()))
    assert values_equal(live["optimizer"].state_dict(), expected["optimizer"].state_dict())
    assert live["progress"].step == 3
    assert values_equal(live["scaled"].codes, expected["scaled"].codes)
    assert values_equal(live["nested"][0].codes.scale, expected["scaled"].scale)


def assert_same_trees(new: limpet.Snapshot, golden: limpet.Snapshot) -> None:
    tree, expected = (reader_of(snapshot).manifest.tree for snapshot in (new, golden))
    # the golden runs have no versions of the module's code
    versions = tree["dict"]["model"].pop("metadata")
    assert versions == {"dict": {".": {"dict": {"version": 1}}}}
    assert tree["dict"].pop("model")["ordered"] == expected["dict"].pop("model")["dict"]
    assert tree == expected


def test_this_build_writes_the_same_files(run: limpet.Run, tmp_path: Path) -> None:
    """The same state gives the same tree, leaves, and digests."""
    limpet.save(str(tmp_path / "version_2"), make.state(2))
    new = limpet.open(str(tmp_path / "version_2"))
    golden = run.open(Version(2))
    assert_same_trees(new, golden)
    (a,), (b,) = reader_of(new).indexes(), reader_of(golden).indexes()
    assert [*a.leaves] == [*b.leaves]
    assert a.digests == b.digests


BASES_BY_STEP = {1: set(), 2: {Version(1)}, 3: {Version(1)}, 4: {Version(1), Version(3)}}


@pytest.fixture
def incremental_run(tmp_path: Path) -> limpet.Run:
    return limpet.Run(str(shutil.copytree(GOLDEN / "chain", tmp_path / "run")))


@pytest.mark.parametrize("step", BASES_BY_STEP)
def test_every_incremental_version_is_intact_and_contains_its_values(
    incremental_run: limpet.Run, step: int
) -> None:
    snapshot = incremental_run.open(Version(step))
    assert (snapshot.bases, snapshot.chain) == (BASES_BY_STEP[step], step - 1)
    report = snapshot.verify()
    assert report.ok, report.problems
    found, expected = limpet.load(snapshot.url), {**make.with_frozen(step), **loaded_state(step)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert values_equal(found[name], value), (name, found[name], value)


def test_this_build_writes_the_same_chain(incremental_run: limpet.Run, tmp_path: Path) -> None:
    make.make_chain(str(tmp_path / "new"))
    for step in BASES_BY_STEP:
        new = limpet.Run(str(tmp_path / "new")).open(Version(step))
        golden = incremental_run.open(Version(step))
        assert_same_trees(new, golden)
        assert (new.nbytes, new.referred_bytes) == (golden.nbytes, golden.referred_bytes)
        (a,), (b,) = reader_of(new).indexes(), reader_of(golden).indexes()
        assert [*a.leaves] == [*b.leaves]
        assert a.digests == b.digests
        if a.chunk_refs is not None and b.chunk_refs is not None:
            assert (a.chunk_refs.files == b.chunk_refs.files).all()
            assert (a.chunk_refs.offsets == b.chunk_refs.offsets).all()


def test_a_spread_run_is_read_and_continued(tmp_path: Path) -> None:
    url = str(shutil.copytree(GOLDEN / "spread", tmp_path / "run"))
    run = limpet.Run(url)
    assert [s.verify().ok for s in run.snapshots()] == [True, True]
    for step in (1, 2):
        state = limpet.load(f"{url}/version_{step}")
        assert state["array"].tolist() == [step + n for n in range(5)]
    live = {"progress": limpet.Progress(), "array": np.zeros(5)}
    with limpet.Checkpointer(url, live) as ckpt:
        ckpt.resume()
        ckpt.step()
    assert [v.step for v in run.line()] == [1, 2, 3]
    assert run.spread_folders() == [f"{url}/spread-07", f"{url}/spread-0e"]
    assert [s.verify().ok for s in run.snapshots()] == [True, True, True]
