"""Every build reads the files of every released format, and finds the same values."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import limpet
from limpet.format.names import Version
from limpet.snapshot.snapshot import reader_of
from tests.forging import values_equal
from tests.golden import make

HERE = Path(__file__).parent
LINEAGE = [Version(1), Version(2, 1), Version(3, 1)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:ComplexHalf", "ignore:Sparse invariant"
)


@pytest.fixture
def run(tmp_path: Path) -> limpet.Run:
    """Return a copy, because tests must not write to the golden files."""
    return limpet.Run(str(shutil.copytree(HERE / "format-1", tmp_path / "run")))


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
    return state


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


def test_this_build_writes_the_same_format_1(run: limpet.Run, tmp_path: Path) -> None:
    """The same state gives the same tree, leaves, and digests."""
    limpet.save(str(tmp_path / "version_2"), make.state(2))
    new = limpet.open(str(tmp_path / "version_2"))
    golden = run.open(Version(2))
    assert reader_of(new).manifest.tree == reader_of(golden).manifest.tree
    (a,), (b,) = reader_of(new).indexes(), reader_of(golden).indexes()
    assert a.leaves == b.leaves
    assert a.digests == b.digests


# -- format 2: incremental versions --------------------------------------------------------------

BASES_BY_STEP = {1: set(), 2: {Version(1)}, 3: {Version(1)}, 4: {Version(1), Version(3)}}


@pytest.fixture
def incremental_run(tmp_path: Path) -> limpet.Run:
    return limpet.Run(str(shutil.copytree(HERE / "format-2", tmp_path / "run")))


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


def test_this_build_writes_the_same_format_2(incremental_run: limpet.Run, tmp_path: Path) -> None:
    make.make_2(str(tmp_path / "new"))
    for step in BASES_BY_STEP:
        new = limpet.Run(str(tmp_path / "new")).open(Version(step))
        golden = incremental_run.open(Version(step))
        assert reader_of(new).manifest.tree == reader_of(golden).manifest.tree
        assert (new.nbytes, new.referred_bytes) == (golden.nbytes, golden.referred_bytes)
        (a,), (b,) = reader_of(new).indexes(), reader_of(golden).indexes()
        assert a.leaves == b.leaves
        assert a.digests == b.digests
        if a.chunk_refs is not None and b.chunk_refs is not None:
            assert (a.chunk_refs.files == b.chunk_refs.files).all()
            assert (a.chunk_refs.offsets == b.chunk_refs.offsets).all()


# -- format 3: types of PyTorch ------------------------------------------------------------------


def test_every_version_of_format_3_is_intact_and_contains_its_values(tmp_path: Path) -> None:
    run = limpet.Run(str(shutil.copytree(HERE / "format-3", tmp_path / "run")))
    for step, bases in ((1, set()), (2, {Version(1)})):
        snapshot = run.open(Version(step))
        assert (reader_of(snapshot).manifest.number, snapshot.bases, snapshot.chain) == (
            3,
            bases,
            step - 1,
        )
        report = snapshot.verify()
        assert report.ok, report.problems
        found, expected = limpet.load(snapshot.url), make.with_types(step)
        assert found["types"] == expected["types"]
        for name in ("step", "frozen", "changes"):
            assert values_equal(found[name], expected[name])
        inner = found["scaled"]
        assert inner["class"] == "tests.golden.make.Scaled"
        assert (inner["dtype"], inner["shape"]) == (torch.float32, torch.Size([2, 3]))
        assert inner["context"] == {"bits": 8, "dtype": torch.float32}
        assert values_equal(inner["tensors"]["codes"], expected["scaled"].codes)
        assert found["nested"][0]["tensors"]["codes"]["tensors"].keys() == {"codes", "scale"}
        live = make.with_types(9)
        limpet.load(snapshot.url, into=live)
        assert values_equal(live["scaled"].codes, expected["scaled"].codes)
        assert values_equal(live["nested"][0].codes.scale, expected["scaled"].scale)
        assert snapshot["types/devices/1"] == torch.device("cuda:0")


def test_this_build_writes_the_same_format_3(tmp_path: Path) -> None:
    make.make_3(str(tmp_path / "new"))
    for step in (1, 2):
        new = limpet.Run(str(tmp_path / "new")).open(Version(step))
        golden = limpet.Run(str(HERE / "format-3")).open(Version(step))
        assert reader_of(new).manifest.tree == reader_of(golden).manifest.tree
        (a,), (b,) = reader_of(new).indexes(), reader_of(golden).indexes()
        assert a.leaves == b.leaves
        assert a.digests == b.digests


def test_a_spread_run_is_read_and_continued(tmp_path: Path) -> None:
    url = str(shutil.copytree(HERE / "spread", tmp_path / "run"))
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
    end, manifest = sorted(p.name for p in (tmp_path / "run" / "version_3").iterdir())
    assert end.startswith("eval-training.")
    assert manifest == "manifest.json"
