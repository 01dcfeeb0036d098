"""``device=``: one device, a mapping from the saved devices, or the saved ones."""

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import LimpetError
from limpet.state.flatten import FlatState
from tests.cli.invoke import run_cli
from tests.fakegroup import FakeGroup
from tests.states import save_state


@pytest.fixture
def from_cuda(monkeypatch):
    """Return a function that saves a state as if its float tensors were on an accelerator."""

    def save(state, name="cuda:3"):
        monkeypatch.setattr(FlatState, "devices", lambda flat: {
            leaf.key: name if leaf.dtype == "float32" else "cpu" for leaf in flat.leaves
        })  # fmt: skip
        url = save_state(state)
        monkeypatch.undo()
        return url

    return save


STATE = {"w": torch.ones(2), "n": torch.ones(2).int(), "plain": 1}


def test_the_devices_are_recorded():
    model = nn.Linear(2, 2)
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    url = save_state({"model": model, "optimizer": optimizer, "bytes": b"12"})
    assert limpet.open(url).metadata["devices"] == "cpu"
    loaded = limpet.load(url, device="saved")
    assert loaded["model"]["weight"].device == torch.device("cpu")
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert "devices" not in limpet.open(save_state({"plain": 1})).metadata


def test_a_mapping_moves_tensors_from_the_saved_devices(from_cuda):
    url = from_cuda(STATE)
    assert limpet.open(url).metadata["devices"] == {"/w": "cuda:3", "/n": "cpu"}
    for mapping in (
        {"cuda:3": "cpu"}, {"cuda": "cpu"}, {torch.device("cuda:3"): torch.device("cpu")},
        {"cuda:3": "cpu", "cuda": "cuda:9"},
    ):  # fmt: skip
        loaded = limpet.load(url, device=mapping)
        assert torch.equal(loaded["w"], torch.ones(2))
        assert loaded["plain"] == 1
    # an exact name comes before the type, and what is not in the mapping stays
    chosen = limpet.load(from_cuda({"n": torch.ones(1).int()}), device={"cuda:3": "cuda:9"})
    assert chosen["n"].device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device must be missing")
@pytest.mark.parametrize(
    ("device", "to"),
    [("saved", 3), ({}, 3), ({"cpu": "cpu", "cuda:1": "cpu"}, 3), ({"cuda:3": "cuda:7"}, 7)],
)
def test_a_device_that_is_not_here_is_named_with_the_mapping_to_use(from_cuda, device, to):
    url = from_cuda(STATE)
    with pytest.raises(LimpetError) as e:
        limpet.load(url, device=device)
    assert f"was saved from cuda:3, and device= loads it to cuda:{to}, which" in str(e.value)
    assert 'device={"cuda:3": "cpu"}' in str(e.value)
    assert limpet.load(url, device="saved", keys="n")["n"].device.type == "cpu"
    assert torch.equal(limpet.load(url)["w"], torch.ones(2))


NOWHERE = ["hpu:3", torch.device("hpu"), "nonsense", True, ["cpu"]]


@pytest.mark.parametrize("device", NOWHERE, ids=str)
def test_one_device_that_is_not_here_is_refused_before_any_read(tmp_path, device):
    snapshot = limpet.save(tmp_path / "version_1", STATE)
    for shard in tmp_path.glob("version_1/shard*"):
        shard.unlink()
    live = {"w": torch.zeros(2), "n": torch.zeros(2).int(), "plain": 0}
    for load in (limpet.load, limpet.Snapshot.load):
        for options in ({}, {"keys": "plain"}, {"into": live}):
            with pytest.raises(LimpetError, match=r"cannot be used in this process: \w") as e:
                load(snapshot, device=device, **options)
            assert str(e.value).startswith(f"device={device!r} ")
            assert str(e.value).count(". ") == 0
            assert str(e.value).count("\n") == 0
    assert live["plain"] == 0


def test_if_one_rank_lacks_the_device_all_raise():
    url = save_state(STATE)
    states = [{"w": torch.zeros(2), "n": torch.zeros(2).int(), "plain": 0} for _ in range(2)]
    errors = {}

    def load(rank):
        try:
            limpet.load(url, into=states[rank], device=["cpu", "hpu"][rank], timeout=20)
        except LimpetError as e:
            errors[rank] = str(e)

    with FakeGroup(2) as group:
        group.run(load)
    assert all("device='hpu' cannot be used in this process" in errors[rank] for rank in (0, 1))
    assert [state["plain"] for state in states] == [0, 0]


def test_an_evaluation_with_a_device_that_is_not_here_records_no_failure(tmp_path):
    limpet.save(tmp_path / "version_1", STATE, step=1)
    code = "tests.evaluation.trivial"
    result = run_cli(
        "evaluate", tmp_path, "--with", code, "--data", f"{code}:data", "--workers", 0,
        "--keys", "w", "--device", "hpu:1",
    )  # fmt: skip
    assert result.code != 0
    assert "device='hpu:1' cannot be used in this process" in result.err
    assert [*tmp_path.glob("version_1/eval*")] == []


@pytest.mark.parametrize("mapping", [{"cuda:0": "none"}, {"what": "cpu"}, {"cpu": None}])
def test_an_invalid_mapping_is_refused(mapping):
    with pytest.raises(LimpetError, match="device= must be a mapping of devices"):
        limpet.load(save_state(STATE), device=mapping)


def test_a_version_without_a_record_is_refused(monkeypatch):
    monkeypatch.setattr(FlatState, "devices", lambda flat: {})
    url = save_state(STATE)
    for device in ("saved", {"cuda:0": "cpu"}):
        with pytest.raises(LimpetError, match=r"It is not known from which device 'w'.*no record"):
            limpet.load(url, device=device)
    assert limpet.load(url, device="saved", keys="plain") == {"plain": 1}
    assert torch.equal(limpet.load(url, device="cpu")["w"], torch.ones(2))


def test_the_device_of_a_renamed_or_tied_tensor_is_found(from_cuda):
    shared = torch.ones(2)
    url = from_cuda({"a": {"x": shared, "y": shared}, "n": torch.ones(1).int()})
    loaded = limpet.load(url, device={"cuda": "cpu"}, rename={"a/x": "a/z"})
    assert loaded["a"]["y"] is loaded["a"]["z"]


def test_new_tensors_of_a_load_into_a_live_state_follow_the_mapping(from_cuda):
    live = {"w": None, "n": torch.zeros(2).int(), "plain": 0}
    limpet.load(from_cuda(STATE), into=live, device={"cuda:3": "cpu"})
    assert torch.equal(live["w"], torch.ones(2))


def test_the_devices_of_ranks_are_merged(monkeypatch):
    """Each rank has its own accelerator. A rank without tensors does not count."""
    monkeypatch.setattr(FlatState, "devices", lambda flat: {
        leaf.key: f"cuda:{int(leaf.source[0])}" for leaf in flat.leaves
    })  # fmt: skip
    url = "memory://devices-of-ranks/version_1"
    states = [{f"w{rank}": torch.full((2,), float(rank))} for rank in range(3)] + [{"plain": 1}]
    with FakeGroup(4) as group:
        group.run(lambda rank: limpet.save(url, states[rank]))
    assert limpet.open(url).metadata["devices"] == "cuda"
    assert sorted(limpet.load(url, device={"cuda": "cpu"})) == ["plain", "w0", "w1", "w2"]
