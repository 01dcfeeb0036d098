"""Addresses of versions, above all ``RUN@best``, wherever a snapshot is named."""

from copy import copy
from typing import Any

import pytest

import limpet
from limpet.errors import NoSnapshot, NotFound
from limpet.loading.snapshot import reader_of
from limpet.run import address as address_module
from limpet.run.address import open_reader, open_version, read_objectives
from limpet.run.policy import EverySteps, KeepBest, KeepLast, StopWhen
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli
from tests.fakegroup import FakeGroup

ACCURACY = {1: 0.5, 2: 0.9, 3: 0.9, 4: float("nan"), 5: 0.1}
LOSS = {1: 3.0, 2: float("nan"), 3: 2.0, 4: 1.0, 5: 1.5}


def train(url, keep=None, stop=None, last=5):
    """Save versions 1 to ``last`` with the metrics ``acc`` and ``val/loss``."""
    state = {"x": [0.0], "progress": limpet.Progress()}
    options = {"save": EverySteps(1), "keep": keep, "stop": stop}
    with limpet.Checkpointer(url, state, **options) as ckpt:
        for step in range(1, last + 1):
            state["x"] = [float(step)]
            ckpt.step({"acc": ACCURACY[step], "val/loss": LOSS[step]})
            ckpt.wait()


BEST_LOSS = KeepLast(9) | KeepBest(1, "val/loss")
WORST_LOSS = KeepBest(1, "val/loss", "max")


@pytest.mark.parametrize(
    ("keep", "stop", "objectives"),
    [
        (None, None, {}),
        (KeepLast(2), None, {}),
        (BEST_LOSS | KeepBest(1, "acc", "max"), None, {"val/loss": "min", "acc": "max"}),
        (BEST_LOSS, StopWhen("acc", 3, "max"), {"val/loss": "min", "acc": "max"}),
        (BEST_LOSS, StopWhen("val/loss", 9), {"val/loss": "min"}),
        (BEST_LOSS | WORST_LOSS, StopWhen("val/loss", 9, "max"), {"val/loss": "both"}),
    ],
)
def test_policies_record_their_metrics_in_every_version(tmp_path, keep, stop, objectives):
    train(tmp_path / "a", keep, stop, last=2)
    for snapshot in limpet.Run(tmp_path / "a").snapshots():
        assert read_objectives(reader_of(snapshot)) == objectives
        assert ("objectives" in snapshot.metadata) == bool(objectives)
        assert snapshot.metadata.get("objectives", {}) == objectives


def test_best_uses_the_only_recorded_metric_and_ignores_nan(tmp_path):
    train(tmp_path / "a", BEST_LOSS)
    for address in ("a@best", "a@best:val/loss"):
        assert limpet.open(f"{tmp_path}/{address}").step == 4
        assert limpet.load(tmp_path / address)["x"] == [4.0]
    train(tmp_path / "b", KeepBest(9, "acc", "max"))
    assert limpet.open(f"{tmp_path}/b@best").step == 3  # of equal values, the newest


def test_the_current_lineage_counts(tmp_path):
    train(tmp_path / "a", BEST_LOSS)
    state = {"x": [0.0], "progress": limpet.Progress()}
    keep = {"save": EverySteps(1), "keep": BEST_LOSS}
    with limpet.Checkpointer(tmp_path / "a", state, **keep) as ckpt:
        ckpt.resume(at=1)
        ckpt.step({"val/loss": 2.5})
    assert reader_of(limpet.open(f"{tmp_path}/a@best")).location.folder == "version_2.1"


@pytest.mark.parametrize(
    ("keep", "stop", "address", "found"),
    [
        (BEST_LOSS | KeepBest(1, "acc", "max"), None, "@best",
         "metrics acc, val/loss, and the modes acc (max), val/loss (min)"),
        (None, None, "@best", "metrics acc, val/loss, and the modes (none)"),
        (None, None, "@best:acc", "metrics acc, val/loss, and the modes (none)"),
        (None, None, "@best:bleu", "metrics acc, val/loss, and the modes (none)"),
        (KeepLast(3) | KeepBest(1, "bleu", "max"), None, "@best", "the modes bleu (max)"),
        (BEST_LOSS | WORST_LOSS, None, "@best:val/loss", "modes val/loss (both)"),
    ],
)  # fmt: skip
def test_an_error_says_which_metrics_and_modes_are_recorded(tmp_path, keep, stop, address, found):
    train(tmp_path / "a", keep, stop, last=2)
    with pytest.raises(NotFound) as caught:
        limpet.open(f"{tmp_path}/a{address}")
    assert f"a{address} does not name a version. Expected one metric" in str(caught.value)
    assert found in str(caught.value)
    assert f".Run('{tmp_path}/a').best(METRIC, mode=" in str(caught.value)
    assert run_cli("show", f"{tmp_path}/a{address}").code == 4


def test_the_command_that_an_error_names_finds_the_best_version(tmp_path):
    """The metric is there, but nobody has recorded its mode."""
    train(tmp_path / "a", None)
    with pytest.raises(NotFound) as caught:
        limpet.open(f"{tmp_path}/a@best:acc")
    text = str(caught.value)
    command = text[text.index("limpet best") :].partition(", in Python")[0]
    assert command == f"limpet best {tmp_path}/a --metric acc --mode min|max"
    assert "counts=True" not in text
    found = run_cli(*command.replace("min|max", "max").split()[1:])
    assert f"{tmp_path}/a@3" in found.out, found


def test_a_metric_that_is_always_nan(tmp_path):
    state = {"progress": limpet.Progress()}
    keep = KeepLast(2) | KeepBest(1, "loss")
    with limpet.Checkpointer(tmp_path / "a", state, save=EverySteps(1), keep=keep) as ckpt:
        ckpt.step({"loss": float("nan")})
    with pytest.raises(NotFound, match="a value other than NaN, found the metrics loss"):
        limpet.open(f"{tmp_path}/a@best")


def test_a_run_without_versions(tmp_path):
    (tmp_path / "empty").mkdir()
    for use in (limpet.open, limpet.load):
        for address in ("@best", "@best:loss", "@latest", "@7"):
            with pytest.raises(NotFound, match="empty is not a run with versions"):
                use(f"{tmp_path}/empty{address}")
    train(tmp_path / "damaged", BEST_LOSS, last=1)
    next((tmp_path / "damaged" / "version_1").glob("shard-*.safetensors")).unlink()
    with pytest.raises(NoSnapshot):
        limpet.open(f"{tmp_path}/damaged@best")


def test_a_damaged_version_is_never_the_best(tmp_path):
    train(tmp_path / "a", BEST_LOSS)
    next((tmp_path / "a" / "version_4").glob("shard-*.safetensors")).unlink()
    assert limpet.open(f"{tmp_path}/a@best").step == 5


def test_a_run_whose_name_contains_best(tmp_path):
    run = tmp_path / "a@best:b"
    train(run, BEST_LOSS)
    assert limpet.open(f"{run}@best").step == 4
    assert limpet.open(f"{run}@best:val/loss").step == 4
    assert limpet.open(f"{run}@2").step == 2
    assert limpet.open(f"{run}@latest").step == 5
    assert limpet.open(run / "version_3").step == 3
    assert run_cli("show", f"{run}@2", "--json").json["step"] == 2
    assert len(run_cli("ls", run, "--json").json["versions"]) == 5
    with pytest.raises(NotFound):
        limpet.open(run)
    state = {"x": [0.0], "progress": limpet.Progress()}
    with limpet.Checkpointer(run, state, save=EverySteps(1)) as ckpt:
        assert ckpt.resume() is not None


def test_a_metric_with_any_name(tmp_path):
    metric = "top@1/val:acc@best"
    state = {"progress": limpet.Progress()}
    keep = KeepBest(1, metric, "max")
    with limpet.Checkpointer(tmp_path / "a", state, save=EverySteps(1), keep=keep) as ckpt:
        ckpt.step({metric: 0.5})
    assert limpet.open(f"{tmp_path}/a@best:{metric}").step == 1
    assert run_cli("show", f"{tmp_path}/a@best:{metric}").code == 0


def test_a_store_is_opened_as_a_snapshot(tmp_path):
    train(tmp_path / "a", last=1)
    assert open_version(limpet.open_store(tmp_path / "a" / "version_1")).step == 1


class SilentStore(MemoryStore):
    """Answers only with a time limit."""

    def get(self, key, limit):
        raise AssertionError(f"{key} is read without a time limit")

    def list_level(self, folder, prefix=""):
        raise AssertionError(f"{folder} is listed without a time limit")

    def within(self, deadline):
        view = copy(self)
        view.__class__ = MemoryStore
        return view


def test_the_time_limit_of_a_load_also_covers_literal_paths():
    train("memory://silent/a", BEST_LOSS, last=1)
    open_store("memory://silent").__class__ = SilentStore
    for address in ("a@latest", "a@best:val/loss", "a@1"):
        assert limpet.load(f"memory://silent/{address}", timeout=60)["x"] == [1.0]
    with pytest.raises(NotFound):  # it may be a metric or a run
        limpet.load("memory://silent/a@best:b@1", timeout=60)


def test_all_ranks_load_the_version_that_rank_0_has_found(tmp_path, monkeypatch):
    train(tmp_path / "a", BEST_LOSS)
    resolved: list[object] = []

    def resolve(address, deadline=None):
        resolved.append(address)
        return open_reader(address, deadline)

    monkeypatch.setattr(address_module, "open_reader", resolve)

    def load(address):
        into: dict[str, Any] = {"x": [0.0], "progress": limpet.Progress()}
        limpet.load(f"{tmp_path}/{address}", into)
        values: list[float] = into["x"]
        return values

    assert FakeGroup(3).run(lambda rank: load("a@best")) == [[4.0]] * 3
    assert resolved == [f"{tmp_path}/a@best"]
    for error in FakeGroup(3).outcomes(lambda rank: load("a@best:bleu")):
        assert isinstance(error, limpet.errors.LimpetError)
        assert "bleu" in str(error)
