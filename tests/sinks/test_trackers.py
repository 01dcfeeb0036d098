"""Weights & Biases and MLflow: the real ones, offline, and what their runs must not lose."""

import importlib.util
import struct
from math import isnan
from pathlib import Path

import pytest

import limpet
from limpet import sinks
from limpet.errors import LimpetError
from tests.sinks.sample_events import (
    EVENTS,
    SAVED,
    FakeMlflowClient,
    FakeWandbRun,
    make_mlflow_sink,
)

NUMBERS = {
    "limpet/written_bytes": SAVED["bytes"],
    "limpet/referred_bytes": 0,
    "limpet/blocked_seconds": 0.0123,
    "limpet/background_seconds": 2.31,
    "limpet/gib_per_second": SAVED["bytes"] / 2.31 / 2**30,
    "limpet/metrics/loss": 0.25123,
    "limpet/metrics/accuracy": 0.91,
}


def needs(package):
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"needs {package}, which `make test` installs")


# -- without the services --------------------------------------------------------------------------


def test_both_get_the_numbers_of_tensorboard_the_metrics_and_the_addresses():
    run, client = FakeWandbRun(), FakeMlflowClient()
    for sink in (sinks.WandB(run), make_mlflow_sink(client)):
        for name, fields in EVENTS.items():
            sink(name, fields)
    address = "runs/a/version_1300"
    assert run.defined == [("limpet/*", "limpet/step")]
    assert run.rows == [{**NUMBERS, "limpet/version": address, "limpet/step": 1300}]
    assert run.summary == {"limpet/resumed": "runs/a/version_1200"}
    assert client.metrics == [(name, value, 1300) for name, value in NUMBERS.items()]
    resumed = {"limpet.resumed": "runs/a/version_1200"}
    assert client.tags == {"limpet.version": address, **resumed}


def test_a_point_in_the_row_of_an_earlier_one_has_no_value_of_it():
    """Else the metric of step 10 would be shown at step 20."""
    run = FakeWandbRun()
    sink = sinks.WandB(run)
    sink("saved", {**SAVED, "step": 10, "metrics": {"val_loss": 1.0}})
    sink("saved", {**SAVED, "step": 20, "metrics": {}})
    assert run.rows[0]["limpet/step"] == 20
    assert isnan(run.rows[0]["limpet/metrics/val_loss"])
    run.commit()
    sink("saved", {**SAVED, "step": 30, "metrics": {}})
    assert "limpet/metrics/val_loss" not in run.rows[1]


ODD_NAMES = ["a@b%", "é", "q//x", "r/../w", "y/", "\0\1", "", "a:b c", "x" * 300, "z" * 234 + "/z"]


def test_wrong_arguments_are_refused():
    with pytest.raises(LimpetError, match=r"run= must be the run that wandb.init\(\) returned"):
        sinks.WandB(Path())
    with pytest.raises(LimpetError, match=r"client= must be an mlflow.MlflowClient\(\), not"):
        sinks.MLflow(Path(), "id")
    with pytest.raises(LimpetError, match=r"run_id= must be the run.info.run_id of the program"):
        sinks.MLflow(FakeMlflowClient(), Path())


def train(folder, sink):
    """A training that saves steps 2 and 4, and one that resumes it and saves steps 6 and 8."""
    for last in (4, 8):
        with (
            limpet.attach(sink),
            limpet.Checkpointer(
                folder, {"x": [0.0]}, save=limpet.EverySteps(2), quiet=True
            ) as ckpt,
        ):
            for step in ckpt.steps(last):
                ckpt.step({"loss": 1.0 / (step + 1), "odd": float("nan")})
                ckpt.wait()
                yield step


# -- Weights & Biases ------------------------------------------------------------------------------


def read_offline_run(folder):
    """Return the rows and the last values of the summary in the file of an offline run: records of
    protocol buffers in the blocks of LevelDB's log."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    raw, at, parts, rows, summary = file.read_bytes(), 7, b"", [], {}
    while at < len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = Record.FromString(parts)
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            rows += [{n: json.loads(v) for n, v in items.items()}] if items else []
            summary |= {i.key or i.nested_key[0]: i.value_json for i in record.summary.update}
            parts = b""
    return rows, summary


@pytest.mark.slow
@needs("wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    """The program logs each step twice with a step of its own: no such row may be lost."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    import wandb

    monkeypatch.chdir(tmp_path)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    run = wandb.init(mode="offline", project="limpet", dir=tmp_path, settings=settings)
    sink = sinks.WandB(run)
    for step in train(tmp_path / "run", sink):
        run.log({"own/a": step}, step=step)
        run.log({"own/b": -step}, step=step)
    run.finish()
    for call in (lambda: sinks.WandB(run), lambda: sink("saved", SAVED)):
        with pytest.raises(wandb.Error, match="is finished"):  # not after 30 s
            call()
    wandb.teardown()  # until then, its process may not have written the file
    rows, summary = read_offline_run(tmp_path)
    assert [(r["own/a"], r["own/b"]) for r in rows if "own/a" in r] == [(i, -i) for i in range(8)]
    ours = [r for r in rows if "limpet/step" in r]
    assert [r["limpet/step"] for r in ours] == [2, 4, 6, 8]
    assert [r["limpet/metrics/loss"] for r in ours] == [1 / 2, 1 / 4, 1 / 6, 1 / 8]
    assert all(r["limpet/written_bytes"] > 0 and isnan(r["limpet/metrics/odd"]) for r in ours)
    assert ours[-1]["limpet/version"] == f"{tmp_path}/run/version_8"
    assert summary["limpet/resumed"] == f'"{tmp_path}/run/version_4"'


# -- MLflow ----------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    run = client.create_run(client.create_experiment("e"))
    operations, log_batch = [], client.log_batch

    def log(*args, **fields):
        operations.append(log_batch(*args, **fields))
        operations[-1].wait()  # a folder of MLflow is not safe for several threads

    monkeypatch.setattr(client, "log_batch", log)
    sink = sinks.MLflow(client, run.info.run_id)
    for _ in train(tmp_path / "run", sink):
        pass
    assert len(operations) == 5  # one for each save and resume
    metrics = dict.fromkeys(ODD_NAMES, 1.0) | {f"many/{n}": float(n) for n in range(1500)}
    sink("saved", {**SAVED, "step": 9, "metrics": metrics})
    assert len(operations) == 7

    def read(name):
        found = client.get_metric_history(run.info.run_id, f"limpet/{name}")
        return sorted((m.step, m.value) for m in found)

    names = {"a_b_", "é", "q/_/x", "r/_/w", "y/_", "x" * 235, "z" * 234, "_", "__", "a_b c"}
    names |= {"loss", "odd", *(f"many/{n}" for n in range(1500))}
    data = client.get_run(run.info.run_id).data
    assert {n.removeprefix("limpet/metrics/") for n in data.metrics if "/metrics/" in n} == names
    assert read("metrics/many/1499") == [(9, 1499.0)]
    assert read("metrics/loss") == [(2, 1 / 2), (4, 1 / 4), (6, 1 / 6), (8, 1 / 8)]
    assert [step for step, _ in read("written_bytes")] == [2, 4, 6, 8, 9]
    assert data.tags["limpet.version"] == "runs/a/version_1300"
    assert data.tags["limpet.resumed"] == f"{tmp_path}/run/version_4"
