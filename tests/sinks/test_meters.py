"""Prometheus and TensorBoard."""

import sys
from pathlib import Path

import pytest

import limpet
from limpet import sinks
from limpet.errors import LimpetError
from tests.sinks.sample_events import EVENTS, SAVED, FakeSummaryWriter


def test_prometheus_counters_and_gauges():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    sink = sinks.Prometheus(registry, clock=lambda: 1e9)

    def value(name):
        return registry.get_sample_value(f"limpet_{name}")

    # The counter exists before the first event, so that rates are correct from the start.
    assert value("saves_total") == 0
    sink("resumed", EVENTS["resumed"])
    assert value("last_step") == 1200
    assert value("last_success_timestamp_seconds") == 0
    sink("saved", {**SAVED, "referred": 5})
    sink("saved", {**SAVED, "bytes": -1, "seconds": float("nan"), "blocked": "long"})
    sink("save_failed", EVENTS["save_failed"])
    sink("preempted", EVENTS["preempted"])
    expected = {
        "saves_total": 2, "resumes_total": 1, "save_failures_total": 1,
        "preemptions_total": 1, "written_bytes_total": SAVED["bytes"], "referred_bytes_total": 5,
        "blocked_seconds_total": 0.0123, "background_seconds_total": 2.31, "last_step": 1300,
        "last_success_timestamp_seconds": 1e9,
    }  # fmt: skip
    assert {name: value(name) for name in expected} == expected
    names = {
        s.name for m in registry.collect() for s in m.samples if not s.name.endswith("_created")
    }
    assert names == {f"limpet_{name}" for name in expected}
    document = (Path(limpet.__file__).parents[2] / "docs/events.md").read_text()
    assert all(f"`{name}`" in document for name in names)
    with pytest.raises(ValueError, match="Duplicated"):
        sinks.Prometheus(registry)


def test_the_error_without_the_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(LimpetError, match=r'pip install "limpet\[prometheus\]"'):
        sinks.Prometheus()


def test_tensorboard_scalars():
    writer = FakeSummaryWriter()
    sink = sinks.TensorBoard(writer)
    for name, fields in EVENTS.items():
        sink(name, fields)
    sink("saved", {"step": 7, "bytes": 0, "seconds": 0.0})
    assert writer == [
        ("limpet/written_bytes", SAVED["bytes"], 1300),
        ("limpet/referred_bytes", 0, 1300),
        ("limpet/blocked_seconds", 0.0123, 1300),
        ("limpet/background_seconds", 2.31, 1300),
        ("limpet/gib_per_second", SAVED["bytes"] / 2.31 / 2**30, 1300),
        ("limpet/written_bytes", 0, 7),
        ("limpet/background_seconds", 0, 7),
    ]
    with pytest.raises(LimpetError, match=r"writer= must be a writer with add_scalar"):
        sinks.TensorBoard(Path())
