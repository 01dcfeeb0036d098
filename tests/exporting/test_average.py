"""Averages of versions: exact, in bounded memory, and refused unless the versions match."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch as st
import torch
from hypothesis import given, settings
from hypothesis import strategies as hst

import limpet
from limpet.errors import DigestMismatch, FormatError, LimpetError, NotFound, PlanError
from limpet.exporting import average as average_module
from limpet.exporting.average import _from_float64, _to_float64
from limpet.snapshot.snapshot import reader_of
from tests.cli.invoke import run_cli
from tests.exporting.test_public_export import flip_bit, make_run, read_record
from tests.snapshot.manual_shards import split_columns, split_rows, write_resharded

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


def save(run: Path, models: list[dict[str, Any]]) -> list[limpet.Snapshot]:
    """Save one version for each model: 1, 2, ..."""
    return [
        limpet.save(f"{run}/version_{step}", {"model": model, "epoch": step}, step=step)
        for step, model in enumerate(models, 1)
    ]


def export(run: Path, count: int, to: Path, **options: Any) -> dict[str, torch.Tensor]:
    limpet.export(f"{run}@latest", to, "safetensors", average=count, **options)
    return st.load_file(to / "model.safetensors")


def all_dtypes(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model: dict[str, Any] = {
        name: torch.randn(5, 7, generator=generator).to(getattr(torch, name)) for name in FLOATS
    }
    model["complex64"] = torch.randn(6, dtype=torch.complex64, generator=generator)
    model |= {
        "n": torch.tensor(seed),
        "flag": torch.tensor([seed % 2 == 0]),
        "empty": torch.ones(0),
    }
    return model | {
        "bytes": torch.full((3,), seed, dtype=torch.uint8),
        "array": np.full(3, seed / 7),
    }


@pytest.mark.parametrize("window", [64, 100, 1 << 20])
def test_floats_are_averaged_and_the_rest_is_of_the_newest(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(average_module, "WINDOW", window)
    models = [all_dtypes(seed) for seed in range(5)]
    save(tmp_path / "a", models)
    found = export(tmp_path / "a", 3, tmp_path / "out")
    for name in FLOATS:
        total = sum(model[name].double() for model in models[2:]) / 3
        expected = total.to(getattr(torch, name)).double()
        difference = (found[name].double() - expected).abs()
        # torch rounds twice, so it may be one unit off
        assert difference.max() <= torch.finfo(getattr(torch, name)).eps * expected.abs().max()
    exact = sum(model["float64"] for model in models[2:]) / 3
    assert torch.equal(found["float64"], exact)
    assert found["array"].tolist() == pytest.approx([3 / 7] * 3, rel=1e-15)
    mean = sum(model["complex64"].to(torch.complex128) for model in models[2:]) / 3
    assert torch.equal(found["complex64"], mean.to(torch.complex64))
    assert (found["n"], found["flag"], found["bytes"].tolist()) == (4, True, [4] * 3)
    assert found["empty"].shape == (0,)


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_every_format_has_the_average_and_its_sources(kind: Any, tmp_path: Path) -> None:
    snapshots = save(tmp_path / "a", [{"w": torch.full((3,), float(x))} for x in (1, 2, 6)])
    result = limpet.export(f"{tmp_path}/a@latest", tmp_path / "out", kind, average=3)
    assert result.averaged == ("version_1", "version_2", "version_3")
    if kind == "torch":
        file = tmp_path / "out" / "model.pt"
        state = torch.load(file, weights_only=True)
        assert (state["model"]["w"].tolist(), state["epoch"]) == ([3.0] * 3, 3)
    else:
        file = tmp_path / "out" / "model.safetensors"
        assert st.load_file(file)["w"].tolist() == [3.0] * 3
    assert read_record(file)["averaged"] == [
        {"version": f"version_{n}", "manifest": reader_of(s).digest}
        for n, s in enumerate(snapshots, 1)
    ]
    assert run_cli("verify", tmp_path / "out").code == 0


@given(
    values=hst.lists(
        hst.lists(hst.floats(width=32), min_size=4, max_size=4), min_size=2, max_size=5
    )
)
@settings(max_examples=60)
def test_any_values_including_nan_and_infinity(values: list[list[float]]) -> None:
    total = _to_float64(memoryview(np.array(values[0], "f4")).cast("B"), "float32")
    with np.errstate(all="ignore"):
        for row in values[1:]:
            total += np.array(row, "f4")
        total /= len(values)
        found = np.frombuffer(_from_float64(total, "float32"), "f4")
    for column, result in zip(zip(*values), found):
        if not np.isfinite(column).all():
            assert not np.isfinite(result)
        else:
            exact = sum(map(Fraction, column)) / len(column)
            assert abs(Fraction(float(result)) - exact) <= abs(exact) / 2**22 + Fraction(1, 2**120)


@given(bits=hst.lists(hst.floats(-1e300, 1e300), min_size=1, max_size=40))
@settings(max_examples=100)
def test_bfloat16_is_rounded_once(bits: list[float]) -> None:
    """Compare with the nearest of the two neighbors, by exact arithmetic."""
    with np.errstate(over="ignore"):
        raw = bytearray(_from_float64(np.array(bits), "bfloat16"))
    found = torch.frombuffer(raw, dtype=torch.bfloat16).double()
    for value, result in zip(bits, found.tolist()):
        if abs(value) > 3.38e38:
            assert abs(result) >= 3.38e38
            continue
        near = torch.tensor([result], dtype=torch.bfloat16)
        pattern = int(near.view(torch.int16))
        around = torch.tensor([max(-32768, min(32767, pattern + d)) for d in (-1, 1)])
        for other in around.to(torch.int16).view(torch.bfloat16).double().tolist():
            if np.isfinite(other):
                distance = abs(Fraction(other) - Fraction(value))
                assert abs(Fraction(result) - Fraction(value)) <= distance


def test_a_tie_that_two_roundings_would_break(tmp_path: Path) -> None:
    """1 + 2^-8 is a tie for bfloat16. A little more, which float32 cannot hold, decides it."""
    value = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8 - 2**-40])
    found = torch.frombuffer(bytearray(_from_float64(value, "bfloat16")), dtype=torch.bfloat16)
    assert found.tolist() == [1 + 2**-7, 1.0, 1 + 2**-7]


def test_nan_minus_zero_and_equal_values_are_kept(tmp_path: Path) -> None:
    weights = torch.tensor([float("nan"), -0.0, 0.1, float("inf")], dtype=torch.float32)
    save(tmp_path / "a", [{"w": weights}] * 3)
    found = export(tmp_path / "a", 3, tmp_path / "out")["w"]
    assert torch.equal(found.view(torch.int32), weights.view(torch.int32))


def test_sharded_and_incremental_versions(tmp_path: Path) -> None:
    models = [{"w": torch.randn(24, 10), "v": torch.randn(33)} for _ in range(3)]
    state = {"model": {**models[0]}, "progress": limpet.Progress()}
    options = {"save": limpet.EverySteps(1), "incremental": True}
    with limpet.Checkpointer(tmp_path / "a", state, **options) as ckpt:
        for model in models:
            state["model"]["w"] = model["w"]
            ckpt.step()
            ckpt.wait()
    expected = (sum(m["w"].double() for m in models) / 3).float()
    found = export(tmp_path / "a", 3, tmp_path / "out")
    assert torch.equal(found["w"], expected)
    assert torch.equal(found["v"], models[0]["v"])


@pytest.mark.parametrize("layout", [split_rows, split_columns])
def test_versions_in_other_layouts(layout: Any, tmp_path: Path) -> None:
    weights = [torch.randn(8, 6) for _ in range(2)]
    first, second = save(tmp_path / "a", [{"w": w} for w in weights])
    other = tmp_path / "b"
    limpet.save(other / "version_1", limpet.load(first.url), step=1)
    location = limpet.Run(other).location(limpet.open(second.url).version)
    write_resharded(reader_of(second), location, layout(3), 3)
    found = export(other, 2, tmp_path / "out")["w"]
    assert torch.equal(found, ((weights[0].double() + weights[1].double()) / 2).float())


# -- which versions ------------------------------------------------------------------------------


def test_the_lineage_that_ends_at_the_version_counts(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(1)}, "progress": limpet.Progress()}
    for start, last, value in ((None, 4, 1.0), (2, 5, 10.0)):
        options = {"save": limpet.EverySteps(1)}
        with limpet.Checkpointer(tmp_path / "a", state, **options) as ckpt:
            if start is not None:
                ckpt.resume(at=start)
            while ckpt.current_step < last:
                state["model"]["w"] += value
                ckpt.step()
    run = tmp_path / "a"  # 1, 2, then 3, 4 and, on branch 1, 12, 22, 32
    for address, count, expected in (
        ("@latest", 3, (12 + 22 + 32) / 3), ("@latest", 5, (1 + 2 + 12 + 22 + 32) / 5),
        ("@4", 3, (2 + 12 + 22) / 3), ("@4.0", 3, (2 + 3 + 4) / 3), ("@2", 2, 1.5),
    ):  # fmt: skip
        to = tmp_path / f"{address}{count}.safetensors"
        limpet.export(f"{run}{address}", to, "safetensors", average=count)
        assert st.load_file(to)["w"].item() == pytest.approx(expected), address


def test_too_few_versions(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": torch.ones(2)}] * 3)
    result = run_cli(
        "export", f"{tmp_path}/a@2", "--to", "safetensors", tmp_path / "out", "--average", 3
    )
    assert result.code == 4
    assert "Expected 3 versions up to version_2, found version_1, version_2" in result.err
    assert not (tmp_path / "out").exists()
    limpet.save(tmp_path / "plain", {"w": torch.ones(2)})
    with pytest.raises(LimpetError, match="is not a version of a run"):
        limpet.export(tmp_path / "plain", tmp_path / "out", average=2)


def test_versions_with_other_leaves_shapes_or_dtypes_are_refused(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [
        {"w": torch.ones(2, 3), "b": torch.ones(2), "old": torch.ones(1)},
        {"w": torch.ones(2, 4), "b": torch.ones(2).half(), "new": torch.ones(1)},
    ]
    save(tmp_path / "a", models)
    with pytest.raises(PlanError) as caught:
        limpet.export(f"{tmp_path}/a@latest", tmp_path / "out", average=2)
    assert set(caught.value.leaves) == {"model/w", "model/b", "model/old", "model/new"}
    text = str(caught.value)
    assert "model/w (float32 (2, 3), not float32 (2, 4))" in text
    assert "model/old (float32 (1,), not absent)" in text
    assert not (tmp_path / "out").exists()
    save(tmp_path / "b", [{"w": torch.ones(2), "x": torch.ones(n)} for n in (1, 2)])
    found = export(tmp_path / "b", 2, tmp_path / "selected", keys="model/w", root="model")
    assert found.keys() == {"w"}
    result = run_cli("export", f"{tmp_path}/a@2", "--to", "hf", tmp_path / "o", "--average", 2)
    assert result.code == 6


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_an_average_with_a_damaged_version_is_refused(damaged: int, tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": torch.randn(2000)} for _ in range(3)])
    flip_bit(next((tmp_path / "a" / f"version_{damaged}").glob("shard-*.safetensors")), -100)
    with pytest.raises(DigestMismatch):
        limpet.export(f"{tmp_path}/a@3", tmp_path / "out", average=3)
    assert not list(tmp_path.glob("out/*"))
    manifest = tmp_path / "a" / f"version_{damaged}" / "manifest.json"
    flip_bit(manifest, 40)
    with pytest.raises(FormatError):
        limpet.export(f"{tmp_path}/a@3", tmp_path / "out", average=3)
    manifest.unlink()
    with pytest.raises(NotFound):
        limpet.export(f"{tmp_path}/a@3", tmp_path / "out", average=3)


def test_statistics_of_batch_norm_are_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    warning = r"BatchNorm.*1\.running_mean, model/1\.running_var.*update_bn\(loader, model\)"
    with pytest.warns(UserWarning, match=warning):
        limpet.export(f"{tmp_path}/a@latest", tmp_path / "out", average=2)
    result = run_cli("export", f"{tmp_path}/a@3", "--to", "hf", tmp_path / "b", "--average", 2)
    assert result.code == 0
    assert re.search(warning, result.err)
    report = run_cli(
        "export", f"{tmp_path}/a@3", "--to", "hf", tmp_path / "c", "--average", 2, "--json"
    ).json
    assert report["averaged"] == ["version_2", "version_3"]
    assert re.search(warning, report["warnings"][0])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    code = f"""
import numpy as np, torch, limpet, sys
from tests.memory_peak import print_peak_memory
run = {str(tmp_path / "a")!r}
if sys.argv[1] == "save":
    for step in (1, 2, 3):
        w = {{str(i): torch.full((8 << 20,), step, dtype=torch.bfloat16) for i in range(16)}}
        limpet.save(f"{{run}}/version_{{step}}", {{"model": w}}, step=step)
else:
    torch.ones(1).to(torch.bfloat16)
    with print_peak_memory():
        limpet.export(run + "@latest", run + "-out", average=3)
"""
    for verb in ("save", "export"):
        done = subprocess.run(
            [sys.executable, "-c", code, verb], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 320 << 20  # of 768 MiB


def test_the_cost_is_in_proportion_to_the_number_of_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 leaves took 12 seconds before the first byte was read."""
    leaves = {str(n): ("float32", (1,)) for n in range(40_000)} | {"n": ("int64", (1,))}
    streamed: list[int] = []
    monkeypatch.setattr(average_module, "stream_leaves", lambda _, k, __: streamed.append(len(k)))
    average = average_module.AveragedLeaves([SimpleNamespace(leaves=leaves)])  # type: ignore[list-item]
    monkeypatch.setattr(average, "_stream_average", lambda _, n, __: streamed.append(len(n)))
    began = process_time()
    average.stream([*leaves], lambda *_: None)
    assert streamed == [1, 40_000]
    assert process_time() - began < 3
