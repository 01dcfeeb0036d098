"""The memory of a reshard, whose uploads keep bytes in memory."""

import uuid

import numpy as np
import pytest

import limpet
from limpet.types import MIB
from tests.memory_peak import numbers_of

PROGRAM = """
import sys, numpy as np, limpet
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_snapshot
from limpet.convert.reshard import reshard
from tests.memory_peak import print_peak_memory
a, b = sys.argv[1:]
store = limpet.open_store(b)
limpet.save(limpet.open_store(f"{b}-warm/version_1"), {"model": {"x": np.ones(3)}})
snapshot = open_snapshot(a)
snapshot.indexes()
with print_peak_memory():
    reshard(snapshot, Location(store, "version_1"), 32)
assert limpet.Run(store).latest().verify().ok
"""


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "az", "hdfs"])
def test_the_memory_of_a_reshard_is_bounded(request, tmp_path, store):
    """Of 640 MiB."""
    model = {f"w{i}": np.full((1 << 10, 10 << 10), i, np.int32) for i in range(16)}
    source = limpet.save(tmp_path / "run" / "version_1", {"model": model}, step=1).url
    server = request.getfixturevalue(store)
    url = f"{server.url}/{uuid.uuid4().hex}" if store == "hdfs" else f"{server}/to"
    [growth] = numbers_of(PROGRAM, source, url)
    assert growth < 256 * MIB
