"""The checks of the chaos find what they must find, and its schedule has every kind of event."""

import numpy as np
import pytest

import limpet
from limpet.run.policy import EverySteps
from tests.chaos.ranks import Ranks
from tests.chaos.report import compare_samples, compare_states, executed_samples
from tests.chaos.training import BATCH, Start


def write_steps(folder, size, first, counts):
    """Return ranks that have executed ``counts`` steps; the samples of step n are n * BATCH + i."""
    folder.mkdir()
    for rank, count in enumerate(counts):
        rows = [
            [step, 0, *range(step * BATCH + rank, (step + 1) * BATCH, size)]
            for step in range(first, first + count)
        ]
        (folder / f"rank-{rank}.steps").write_bytes(np.array(rows, np.int64).tobytes() + b"torn")
    ranks = Ranks.__new__(Ranks)
    ranks.start = Start(str(folder), "", size, 0, 0.0)
    return ranks


def test_samples_are_those_of_the_last_execution_by_any_number_of_ranks(tmp_path):
    starts = [
        write_steps(tmp_path / "a", 4, 1, [5, 4, 4, 5]),
        write_steps(tmp_path / "b", 2, 3, [6, 6]),
        write_steps(tmp_path / "c", 3, 9, [2, 2, 2]),
    ]
    whole = executed_samples([write_steps(tmp_path / "d", 4, 1, [10] * 4)])
    assert executed_samples(starts) == whole
    assert compare_samples(executed_samples(starts), whole) == []
    assert starts[0].last_step == starts[0].step_count == 4


def test_a_repeated_a_missing_and_a_torn_step_are_found(tmp_path):
    whole = executed_samples([write_steps(tmp_path / "d", 4, 1, [10] * 4)])
    torn = executed_samples([write_steps(tmp_path / "a", 4, 1, [10, 10, 9, 10])])
    assert "1 steps differ, first in step 10: []" in compare_samples(torn, whole)[0]
    gap = executed_samples(
        [write_steps(tmp_path / "b", 2, 1, [3, 3]), write_steps(tmp_path / "c", 2, 5, [6, 6])]
    )
    assert "first in step 4: None" in compare_samples(gap, whole)[0]
    swapped = {**whole, 2: whole[3], 3: whole[2]}
    assert "2 steps differ, first in step 2" in compare_samples(swapped, whole)[0]


def save_state(url, **changes):
    state = {"model": np.arange(4.0), "rng": 1, "step": 5, **changes}
    with limpet.Checkpointer(str(url), state, save=EverySteps(1)) as ckpt:
        ckpt.step()
    return str(url)


@pytest.mark.parametrize(
    ("changes", "tolerance", "is_found"),
    [
        ({}, 0.0, False),
        ({"model": np.arange(4.0) + 1e-15}, 0.0, True),
        ({"model": np.arange(4.0) + 1e-15}, 1e-6, False),
        ({"model": np.arange(4.0) + 1e-5}, 1e-6, True),
        ({"model": np.full(4, np.nan)}, 1e-6, True),
        ({"model": np.arange(4.0, dtype=np.float32)}, 1e-6, True),
        ({"model": -np.zeros(4)}, 0.0, True),
        ({"rng": 2}, 0.0, True),
        ({"rng": 2}, 1e-6, False),
        ({"step": 6}, 1e-6, True),
        ({"more": 1}, 1e-6, True),
    ],
)
def test_states_are_compared_bit_by_bit_or_within_the_tolerance(
    tmp_path, changes, tolerance, is_found
):
    one, other = save_state(tmp_path / "a"), save_state(tmp_path / "b", **changes)
    problems, _ = compare_states(one, other, tolerance)
    assert bool(problems) == is_found, problems
