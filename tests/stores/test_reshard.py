"""The memory of a reshard and of a copy, whose uploads keep bytes in memory."""

import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet.types import MIB

PROGRAM = """
import sys, numpy as np, limpet
from limpet.snapshot.location import Location, locate
from limpet.snapshot.reader import open_snapshot
from limpet.convert.copy import copy_snapshot
from limpet.convert.reshard import reshard
from tests.memory_peak import print_peak_memory
verb, a, b, part_size = sys.argv[1:]
options = {"part_size": int(part_size)} if int(part_size) else {}
store = limpet.open_store(b, **options)
limpet.save(limpet.open_store(f"{b}-warm/version_1"), {"model": {"x": np.ones(3)}})
snapshot = open_snapshot(a)
snapshot.indexes()
with print_peak_memory():
    if verb == "copy":
        copy_snapshot(snapshot, Location(store, "version_1"))
    else:
        reshard(snapshot, Location(store, "version_1"), 32)
assert limpet.Run(store).latest().verify().ok
"""


def peak_memory(*arguments):
    """Return the peak memory of the program in another process, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(*arguments, peak >> 20, "MiB")
    return peak


@pytest.fixture
def source(tmp_path):
    """The URL of a snapshot of 640 MiB."""
    model = {f"w{i}": np.full((1 << 10, 10 << 10), i, np.int32) for i in range(16)}
    return limpet.save(tmp_path / "run" / "version_1", {"model": model}, step=1).url


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "az", "hdfs"])
def test_the_memory_of_a_reshard_is_bounded(request, source, store):
    server = request.getfixturevalue(store)
    url = f"{server.url}/{uuid.uuid4().hex}" if store == "hdfs" else f"{server}/to"
    assert peak_memory("reshard", source, url, 0) < 256 * MIB


@pytest.mark.slow
def test_the_memory_of_a_copy_in_long_parts_is_bounded(s3, source):
    assert peak_memory("copy", source, f"{s3}/to", 64 * MIB) < 256 * MIB
