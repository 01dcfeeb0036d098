"""Every build reads what every released format number holds, and finds the same values."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.format.names import Version
from tests.forging import values_equal
from tests.golden import make

HERE = Path(__file__).parent
LINE = [Version(1), Version(2, 1), Version(3, 1)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:ComplexHalf", "ignore:Sparse invariant"
)


@pytest.fixture
def run(tmp_path: Path) -> holdfast.Run:
    """A copy: nothing may be written beside what is kept."""
    return holdfast.Run(str(shutil.copytree(HERE / "format-1", tmp_path / "run")))


def plain(step: int) -> dict[str, object]:
    """The state as it comes back without live objects."""
    state = make.state(step)
    model, optimizer = state["model"], state["optimizer"]
    weights = model.state_dict()
    names = {p: f"model.{n}" for n, p in model.named_parameters()}
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    state["progress"] = {"epoch": 0, "step": step, "samples": 0}
    state["model"] = dict(weights)
    state["optimizer"] = {
        "state": {names[p]: dict(slots) for p, slots in optimizer.state.items()},
        "groups": [{**options, "params": list(names.values())}],
    }
    return state


def test_the_line_and_what_was_left(run: holdfast.Run) -> None:
    assert run.line() == LINE
    assert run.listing().versions == sorted([*LINE, Version(2)])
    assert run.read_branch(1).from_version == "version_1"
    latest = run.latest()
    assert latest is not None
    assert latest.version == Version(3, 1)
    assert latest.manifest.parent is not None
    assert latest.manifest.parent.version == "version_2.1"
    assert latest.metadata["metrics"] == {"loss": 1 / 3}


@pytest.mark.parametrize("version", [Version(1), Version(2), *LINE[1:]], ids=str)
def test_every_version_is_sound_and_holds_its_values(run: holdfast.Run, version: Version) -> None:
    snapshot = run.open(version)
    report = snapshot.verify()
    assert report.ok, report.problems
    found, want = holdfast.load(snapshot.url), plain(version.step)
    assert found.keys() == want.keys()
    for name in want:
        assert values_equal(found[name], want[name]), (name, found[name], want[name])
    assert found["tied"][0] is found["model"]["weight"]


def test_a_live_state_goes_on_from_it(run: holdfast.Run) -> None:
    live, want = make.state(0), make.state(3)
    with holdfast.Checkpointer(run.url, live) as ckpt:
        resumed = ckpt.resume()
    assert resumed is not None
    assert values_equal(dict(live["model"].state_dict()), dict(want["model"].state_dict()))
    assert values_equal(live["optimizer"].state_dict(), want["optimizer"].state_dict())
    assert live["progress"].step == 3


def test_this_build_writes_the_same(run: holdfast.Run, tmp_path: Path) -> None:
    """Format 1 says the same of the same state: manifests equal but for names, times, digests."""
    holdfast.save(str(tmp_path / "version_2"), make.state(2))
    ours = holdfast.open(str(tmp_path / "version_2"))
    theirs = run.open(Version(2))
    assert ours.manifest.tree == theirs.manifest.tree
    (a,), (b,) = ours.indexes(), theirs.indexes()
    assert a.leaves == b.leaves
    assert a.digests == b.digests


# -- number 2: incremental versions --------------------------------------------------------------

BASES = {1: set(), 2: {Version(1)}, 3: {Version(1)}, 4: {Version(1), Version(3)}}


@pytest.fixture
def increments(tmp_path: Path) -> holdfast.Run:
    return holdfast.Run(str(shutil.copytree(HERE / "format-2", tmp_path / "run")))


@pytest.mark.parametrize("step", BASES)
def test_every_incremental_version_is_sound_and_holds_its_values(
    increments: holdfast.Run, step: int
) -> None:
    snapshot = increments.open(Version(step))
    assert (snapshot.bases, snapshot.chain) == (BASES[step], step - 1)
    report = snapshot.verify()
    assert report.ok, report.problems
    found, want = holdfast.load(snapshot.url), {**make.with_frozen(step), **plain(step)}
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert values_equal(found[name], value), (name, found[name], value)


def test_this_build_writes_the_same_increments(increments: holdfast.Run, tmp_path: Path) -> None:
    make.make_2(str(tmp_path / "new"))
    for step in BASES:
        ours = holdfast.Run(str(tmp_path / "new")).open(Version(step))
        theirs = increments.open(Version(step))
        assert ours.manifest.tree == theirs.manifest.tree
        assert (ours.nbytes, ours.referred_bytes) == (theirs.nbytes, theirs.referred_bytes)
        (a,), (b,) = ours.indexes(), theirs.indexes()
        assert a.leaves == b.leaves
        assert a.digests == b.digests
        if a.chunk_refs is not None and b.chunk_refs is not None:
            assert (a.chunk_refs.files == b.chunk_refs.files).all()
            assert (a.chunk_refs.offsets == b.chunk_refs.offsets).all()
