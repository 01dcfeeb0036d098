"""Sizes, durations and unusual values as text."""

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from limpet import text
from tests.sinks.sample_events import BrokenRepr, nested_odd_values


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (10_230, "9.99 KiB"), (10_235, "10.0 KiB"),
        (1023 * 1024, "1.00 MiB"), (12_600_000, "12.0 MiB"), (3 << 40, "3.00 TiB"),
        (5 << 60, "5120 PiB"),
    ],
)  # fmt: skip
def test_sizes(nbytes, shown):
    assert text.format_size(nbytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 us"), (12e-6, "12 us"), (0.0009994, "999 us"), (0.0009996, "1.00 ms"),
        (0.9996, "1.00 s"), (99.96, "100 s"), (119.6, "1.99 min"), (7300, "2.03 h"),
        (1e6, "278 h"),
    ],
)  # fmt: skip
def test_durations(seconds, shown):
    assert text.format_duration(seconds) == shown


@given(st.floats(0, 2.0**59), st.floats(0, 3.5e6))
def test_sizes_and_durations_are_short_and_accurate(nbytes, seconds):
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
    units |= {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    for value, shown, tolerance in (
        (nbytes, text.format_size(nbytes), 0.5),
        (seconds, text.format_duration(seconds), 0.5e-6),
    ):
        assert len(shown) <= 8
        number, unit = shown.split()
        assert float(number) * units[unit] == pytest.approx(value, rel=0.0052, abs=tolerance)


@given(nested_odd_values)
def test_every_value_can_be_encoded_as_json(value):
    json.loads(json.dumps(text.to_json_value(value), allow_nan=False))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([2.5]), 2.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (float("nan"), "nan"),
        (2**70, hex(2**70)),
        (torch.zeros(2, 3), "<Tensor of shape (2, 3)>"),
        (OSError(28, "No space"), "OSError: [Errno 28] No space"),
        (ValueError(), "ValueError"),
        ({1: (2, {3})}, {"1": [2, [3]]}),
        (BrokenRepr(), "<BrokenRepr of shape (3,)>"),
        (torch.empty(1, device="meta"), "<Tensor>"),
    ],
)
def test_json_values(value, expected):
    assert text.to_json_value(value) == expected
    assert type(text.to_json_value(value)) is type(expected)


def test_a_recursive_value_is_cut():
    recursive: Any = []
    recursive.append(recursive)
    assert str(text.to_json_value({"x": recursive})).count("[") < 10
