"""``limpet.export``: what other libraries read, the record of an export, and its checks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import limpet
from limpet.convert.export_record import check_export
from limpet.errors import DigestMismatch, LimpetError, MissingLeaf, NotFound
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps, KeepBest, KeepLast
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli

KINDS = {"safetensors": "model.safetensors", "torch": "model.pt", "hf": "model.safetensors"}


def flip_bit(file, place):
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


def make_run(folder):
    """Train three versions with the metric ``val/loss``; the second one is the best."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    state = {"model": model, "progress": limpet.Progress()}
    options = {"save": EverySteps(1), "keep": KeepLast(9) | KeepBest(1, "val/loss")}
    with limpet.Checkpointer(folder, state, **options) as ckpt:
        for loss in (3.0, 1.0, float("nan")):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1
            ckpt.step({"val/loss": loss})
    return model


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "a")
    return tmp_path / "a"


def read(path):
    """Read an export with the library that it is for."""
    if path.suffix == ".safetensors":
        return st.load_file(path)
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def read_record(path):
    return json.loads(Path(f"{path}.limpet.json").read_text())["origin"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_version_is_exported_with_a_record(run, kind, tmp_path):
    result = limpet.export(f"{run}@best", tmp_path / "out", kind, root="model")
    best = limpet.open(f"{run}@2")
    file = tmp_path / "out" / KINDS[kind]
    expected = limpet.load(best.url)["model"]
    found = read(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    make_run(tmp_path / "other").load_state_dict(found)
    record = read_record(file)
    assert {k: record[k] for k in ("run", "version", "step", "manifest", "metrics")} == {
        "run": "a", "version": "version_2", "step": 2, "manifest": reader_of(best).digest,
        "metrics": {"val/loss": 1.0},
    }  # fmt: skip
    assert str(tmp_path) not in json.dumps(record)
    assert {url: os.path.getsize(url) for url, _ in result.files} == dict(result.files)
    assert sorted(url.rpartition("/")[2] for url, _ in result.files) == sorted(
        os.listdir(tmp_path / "out")
    )
    assert (result.snapshot, result.tensors) == (best.url, len(expected))
    assert run_cli("verify", tmp_path / "out").code == 0
    assert run_cli("verify", file).code == 0


def test_metrics_that_json_lacks_and_later_evaluations_are_recorded(run, tmp_path):
    limpet.Run(run).add_metrics(3, {"acc": 0.5})
    limpet.export(f"{run}@3", tmp_path / "x.safetensors", "safetensors")
    assert read_record(tmp_path / "x.safetensors")["metrics"] == {"val/loss": "nan", "acc": 0.5}


def test_a_plain_snapshot_and_a_store_of_a_server(tmp_path):
    limpet.save(tmp_path / "plain", {"model": {"w": torch.ones(3)}}, step=7)
    limpet.export(limpet.open(tmp_path / "plain"), tmp_path / "out")
    record = read_record(tmp_path / "out" / "model.safetensors")
    assert (record["run"], record["version"], record["step"]) == (None, "plain", 7)
    limpet.save("memory://secret-host/version_1", {"w": torch.ones(3)})
    limpet.export("memory://secret-host@1", tmp_path / "m.pt", "torch")
    assert "secret-host" not in (tmp_path / "m.pt.limpet.json").read_text()


@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf"])
def test_every_flipped_bit_is_found(run, kind, tmp_path):
    """Bits all over each file, in the headers and in the tensors."""
    limpet.export(f"{run}@1", tmp_path / "out", kind, root="model", max_shard_size=60)
    for file in sorted((tmp_path / "out").iterdir()):
        raw = file.read_bytes()
        places = {*range(0, len(raw), max(1, len(raw) // 60)), len(raw) - 1}
        for place in sorted(places):
            damaged = bytearray(raw)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            checks = check_export(str(tmp_path / "out"))
            assert any(c.error for c in checks), (file, place)
        file.write_bytes(raw)
    assert not any(c.error for c in check_export(str(tmp_path / "out")))


@pytest.mark.parametrize("kind", KINDS)
def test_verify_and_import_refuse_a_flipped_bit(run, kind, tmp_path):
    limpet.export(f"{run}@1", tmp_path / "out", kind, root="model")
    file = tmp_path / "out" / KINDS[kind]
    assert run_cli("import", file, tmp_path / "imported", "--step", 1).code == 0
    flip_bit(file, -3)
    for place in (tmp_path / "out", file):
        result = run_cli("verify", place, "--json")
        assert result.code == 3
        problems = [p for v in result.json["versions"] for p in v["problems"]]
        assert [p["kind"] for p in problems] == ["DigestMismatch"]
    for place in (file, *((tmp_path / "out",) if kind != "torch" else ())):
        with pytest.raises(DigestMismatch):
            limpet.import_checkpoint(place, tmp_path / "snapshot")
        result = run_cli("import", place, tmp_path / "imported", "--step", 2)
        assert result.code == 3
        assert "differs from what was exported" in result.err


def test_a_part_that_is_missing_or_of_another_export(run, tmp_path):
    for step in (1, 2):
        limpet.export(f"{run}@{step}", tmp_path / f"{step}", "hf", max_shard_size=60)
    parts = sorted((tmp_path / "1").glob("model-*"))
    assert len(parts) > 1
    assert run_cli("verify", tmp_path / "1" / "model.safetensors.index.json").code == 0
    assert run_cli("verify", parts[0]).code == 0
    parts[0].rename(tmp_path / "kept")
    result = run_cli("verify", tmp_path / "1")
    assert result.code == 3
    assert "is missing" in result.out
    (tmp_path / "2" / parts[0].name).rename(parts[0])
    assert run_cli("verify", tmp_path / "1").code == 3
    with pytest.raises(DigestMismatch):
        raise next(c.error for c in check_export(str(tmp_path / "1")) if c.error)


def test_a_killed_export_has_no_record_and_no_index(run, tmp_path):
    """Both are written last. Libraries do not take parts without an index for a model."""
    limpet.export(f"{run}@1", tmp_path / "out", "hf", max_shard_size=60)
    for name in ("model.safetensors.index.json.limpet.json", "model.safetensors.index.json"):
        (tmp_path / "out" / name).unlink()
    assert run_cli("verify", tmp_path / "out").code == 4
    assert run_cli("import", tmp_path / "out", tmp_path / "run", "--step", 1).code == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"length":', b'"lengtH":'), (b'"files":{', b'"files":['), (b'"val/loss"', b'"val/losS"')],
)
def test_a_damaged_record_is_reported(run, old, new, tmp_path):
    limpet.export(f"{run}@1", tmp_path / "out")
    record = tmp_path / "out" / "model.safetensors.limpet.json"
    raw = record.read_bytes()
    assert old in raw
    record.write_bytes(raw.replace(old, new, 1))
    assert run_cli("verify", tmp_path / "out").code == 3
    assert run_cli("verify", tmp_path / "out" / "model.safetensors").code == 3
    assert run_cli("import", tmp_path / "out", tmp_path / "run", "--step", 1).code == 3


def test_files_without_a_record_are_not_exports(tmp_path):
    st.save_file({'"limpet.crc32":"00000000"': torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10" + bytes(7) + b"{ not JSON     }")
    assert check_export(str(tmp_path)) == []
    assert run_cli("verify", tmp_path).code == 4
    for missing in (tmp_path / "missing", tmp_path / "missing" / "model.pt"):
        assert run_cli("verify", missing).code == 4
        with pytest.raises(NotFound):
            limpet.import_checkpoint(missing, tmp_path / "imported")
    result = run_cli("import", tmp_path / "model.safetensors", tmp_path / "run", "--step", 1)
    assert result.code == 0


def test_a_changed_file_that_another_library_wrote_again(run, tmp_path):
    limpet.export(f"{run}@1", tmp_path / "x.safetensors", "safetensors")
    st.save_file(st.load_file(tmp_path / "x.safetensors"), tmp_path / "z.safetensors")
    assert run_cli("verify", tmp_path / "z.safetensors").code == 4
    (tmp_path / "z.safetensors").rename(tmp_path / "x.safetensors")
    assert run_cli("verify", tmp_path / "x.safetensors").code == 3


class OrderedStore(MemoryStore):
    """A store that only appends."""

    @property
    def traits(self):
        traits = super().traits
        return type(traits)(**{f: getattr(traits, f) for f in traits.__slots__} | {"ordered": True})


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_only_appends_gets_the_same_files(run, kind, tmp_path):
    limpet.export(f"{run}@1", tmp_path / "out", kind, max_shard_size=60)
    name = f"ordered-{kind}"
    store = open_store(f"memory://{name}")
    store.__class__ = OrderedStore
    limpet.export(f"{run}@1", f"memory://{name}/out", kind, max_shard_size=60)
    for file in (tmp_path / "out").iterdir():
        assert store.get(f"out/{file.name}", 1 << 30) == file.read_bytes()
    checks = check_export(f"memory://{name}/out")
    assert checks
    assert not any(c.error for c in checks)
    assert run_cli("verify", f"memory://{name}/out").code == 0


def test_invalid_arguments(run, tmp_path):
    out = tmp_path / "out"
    for expected, kind, options in (
        ("to= must be", "onnx", {}),
        *(
            ("max_shard_size= must be", "hf", {"max_shard_size": size})
            for size in ("5GB", 0, -1, True, None, float("nan"))
        ),
    ):
        with pytest.raises(LimpetError, match=expected):
            limpet.export(f"{run}@1", out, kind, **options)
    with pytest.raises(MissingLeaf):
        limpet.export(f"{run}@1", out, root="ema")
    with pytest.raises(NotFound):
        limpet.export(f"{run}@9", out)
    assert not out.exists()


@pytest.mark.parametrize(("kind", "is_wrapped"), [("safetensors", False), ("torch", True)])
def test_an_ema_is_exported_under_the_names_of_the_model(kind, is_wrapped, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    wrapped = nn.DataParallel(model) if is_wrapped else model
    ema = AveragedModel(wrapped, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        ema.update_parameters(wrapped)
    state = {"model": model, "ema": ema}
    limpet.save(tmp_path / "a" / "version_1", state)
    limpet.export(f"{tmp_path}/a@1", tmp_path / "out", kind, root="ema")
    exported = read(tmp_path / "out" / KINDS[kind])
    fresh = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fresh.load_state_dict(exported)
    source = ema.module.module if is_wrapped else ema.module
    for name, value in source.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    assert not torch.equal(fresh[0].weight, model[0].weight)
    # a restart continues the average
    with torch.no_grad():
        source[0].weight.zero_()
    ema.n_averaged.zero_()
    limpet.load(f"{tmp_path}/a@1", into=state)
    assert ema.n_averaged == 3
    assert torch.equal(source[0].weight, fresh[0].weight)


def test_a_selection_of_an_ema_and_a_module_of_that_name(tmp_path):
    ema = {"n_averaged": torch.tensor(3), "module.w": torch.ones(2), "module.b": torch.ones(1)}
    plain = {"module.w": torch.ones(2)}
    mixed = {**ema, "scale": torch.ones(1)}
    limpet.save(tmp_path / "a" / "version_1", {"ema": ema, "plain": plain, "mixed": mixed})
    for root, keys, names in (
        ("ema", (), ["b", "w"]),
        ("ema", ("ema/module.w",), ["w"]),
        ("plain", (), ["module.w"]),
        ("mixed", (), ["module.b", "module.w", "n_averaged", "scale"]),
    ):
        file = tmp_path / f"{root}{len(keys)}.safetensors"
        limpet.export(f"{tmp_path}/a@1", file, "safetensors", root=root, keys=keys)
        assert sorted(st.load_file(file)) == names
    limpet.export(f"{tmp_path}/a@1", tmp_path / "all.pt", "torch")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["ema"].keys() == ema.keys()
