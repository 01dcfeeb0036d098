"""The parts of uploads adapt to the bandwidth that was measured."""

import pytest

from limpet.storage.s3.pace import HOLD, IN_FLIGHT, MEASURED, STEPS, Pace
from limpet.types import MIB


def upload(pace, bandwidth, count=1):
    """Note uploads to a network with a bandwidth that depends on the number of connections."""
    for _ in range(count):
        pace.note(pace.part_size, 1000 * MIB, 1000 * MIB / bandwidth(pace.connections))


def per_connection(connections):
    return 90e6 * connections


def test_the_memory_is_bounded_and_parts_are_whole_blocks():
    assert all(connections * size <= IN_FLIGHT for connections, size in STEPS)
    assert all(size % (4 * MIB) == 0 for _, size in STEPS)


def test_many_connections_while_each_has_a_limit():
    pace = Pace()
    found = []
    for _ in range(100):
        upload(pace, per_connection)
        found.append(pace.connections)
    assert found.count(7) >= 0.9 * len(found)
    assert 3 in found  # it is tried now and then


@pytest.mark.parametrize("bandwidth", [1e6, 1e9, 1e11])
def test_long_parts_where_connections_do_not_help(bandwidth):
    pace = Pace()
    assert pace.connections == 7
    upload(pace, lambda connections: bandwidth * (0.8 + connections / 35), 2)
    assert (pace.connections, pace.part_size) == STEPS[-1]
    upload(pace, lambda connections: bandwidth * (0.8 + connections / 35), 50)
    assert (pace.connections, pace.part_size) == STEPS[-1]


def test_a_network_that_changes():
    pace = Pace()
    upload(pace, lambda connections: 2e9, 5)
    assert pace.connections == 2
    upload(pace, per_connection, 4)
    assert pace.connections == 7
    upload(pace, lambda connections: 2e9, HOLD + 3)
    assert pace.connections == 2


@pytest.mark.parametrize(
    ("size", "length", "seconds"),
    [(16 * MIB, 10**9, 1), (8 * MIB, MEASURED - 1, 1), (8 * MIB, 10**9, 0)],
)
def test_what_does_not_count(size, length, seconds):
    """Other parts, because of a setting or another upload, and uploads that are too short."""
    pace = Pace()
    pace.note(size, length, seconds)
    assert pace.connections == 7
