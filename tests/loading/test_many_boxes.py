"""The memory that a load and a reshard need for a snapshot with a million boxes."""

import sys

import numpy as np
import pytest
from msgspec.structs import replace

import limpet
from limpet.format.digest import digest
from limpet.format.index import Index, IndexBox, IndexLeaf, encode_index
from limpet.format.manifest import FileEntry, Shard
from limpet.format.names import MANIFEST, index_name, shard_name
from limpet.format.sealed import seal
from limpet.loading.snapshot import reader_of
from limpet.types import MIB, Box
from tests.memory_peak import numbers_of

RANKS, LEAVES = 1024, 978
ROWS, WIDTH = 2, 16
NBYTES = ROWS * WIDTH * 4


def write_snapshot(folder):
    """Write a snapshot of zeros. Every rank has rows of every leaf, and each box is one chunk."""
    small = limpet.save(folder / "small", {"x": np.zeros(1, np.float32)})
    folder = folder / "version_1"
    folder.mkdir()
    shape = (RANKS * ROWS, WIDTH)
    keys = [f"layers.{i}.weight" for i in range(LEAVES)]
    zeros, shards = digest(bytes(NBYTES)), []
    header = bytes(4096)  # no load reads it
    for rank in range(RANKS):
        box = Box((rank * ROWS, 0), (ROWS, WIDTH))
        cuts = np.arange(len(header), len(header) + NBYTES * (LEAVES + 1), NBYTES).tolist()
        leaves = [
            IndexLeaf(key, "float32", shape, [IndexBox(box.offsets, box.sizes, at)])
            for key, at in zip(keys, cuts)
        ]
        name = shard_name(rank, RANKS, "0" * 12)
        digests = [digest(header)] + [zeros] * LEAVES
        raw = encode_index(Index(1, name, cuts[-1], len(header), leaves, cuts, digests, []))
        index = FileEntry(index_name(rank, RANKS, "0" * 12), len(raw), digest(raw))
        (folder / index.name).write_bytes(raw)
        with (folder / name).open("wb") as file:
            file.truncate(cuts[-1])
        shards.append(Shard(name, cuts[-1], index, []))
    tree = {"dict": {key: {"tensor": ["float32", list(shape)]} for key in keys}}
    manifest = replace(reader_of(small).manifest, attempt="0" * 12, shards=shards, tree=tree)
    (folder / MANIFEST).write_bytes(seal(manifest)[0])


LOAD = """
state = dict()
for key, (_, (rows, width)) in snapshot.leaves.items():
    mine = torch.ones(rows // ranks, width)
    state[key] = limpet.Boxed(mine, (part * len(mine), 0), (rows, width))
with print_peak_resident():
    limpet.load(url, into=state)
assert not any(boxed.tensor.any() for boxed in state.values())
"""

RESHARD = """
from limpet.snapshot.location import locate
from limpet.convert.reshard import reshard
with print_peak_resident():
    new = reshard(snapshot, locate(url + "_new"), ranks)
assert len(new.manifest.shards) == ranks and new.nbytes > snapshot.nbytes * 0.9
"""

BEGIN = """
import sys, torch, limpet
from limpet.snapshot.reader import open_snapshot
from tests.memory_peak import print_peak_resident
url, part, ranks = sys.argv[1], *map(int, sys.argv[2:])
snapshot = open_snapshot(url)
"""


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.skipif(sys.platform != "linux", reason="measures with Linux's /proc")
def test_loads_and_a_reshard_of_a_million_boxes_stay_within_their_memory_limits(tmp_path):
    """One load runs as one of 512 ranks. The other loads every leaf in full and so needs all boxes.
    The reshard has two windows."""
    write_snapshot(tmp_path)
    url = tmp_path / "version_1"
    for part, ranks in ((300, 512), (0, 1)):
        [growth] = numbers_of(BEGIN + LOAD, url, part, ranks)
        assert growth < 256 * MIB, "in addition to the state"
    [growth] = numbers_of(BEGIN + RESHARD, url, 0, 8)
    assert growth < 512 * MIB
    assert limpet.open(tmp_path / "version_1_new").verify().ok
