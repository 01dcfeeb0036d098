"""What hosts tell one another of the states that they hold, and what follows from it."""

from limpet.format.manifest import FileEntry, Manifest, Shard
from limpet.format.names import MANIFEST, index_name, shard_name
from limpet.format.sealed import seal
from limpet.storage.memory import MemoryStore
from limpet.tiers.inventory import (
    describe_files,
    files_of,
    find_snapshots,
    take_inventory,
)
from tests.test_growth import assert_linear

FOLDER = "version_30"


def make_manifest(ranks, writer="test"):
    """Return the manifest of a state of so many ranks."""
    shards = [
        Shard(
            shard_name(rank, ranks, "7f3a9c000000"),
            1000 + rank,
            FileEntry(index_name(rank, ranks, "7f3a9c000000"), 100 + rank, "0" * 32),
            [],
        )
        for rank in range(ranks)
    ]
    time = "2026-11-25T00:00:00Z"
    return Manifest("7f3a9c000000", time, writer, 30, 0, None, 0, shards, None, None)


def lengths_of(manifest, ranks):
    """Return the files of some ranks, with their lengths."""
    files = [*files_of(manifest).items()]
    return dict(pair for rank in ranks for pair in files[2 * rank : 2 * rank + 2])


def states_of_hosts(hosts, per_host):
    """Return what hosts hold: each the files of its ranks, and copies of those of another host."""
    count = hosts * per_host
    manifest = make_manifest(count)
    raw, _ = seal(manifest)
    states = []
    for host in range(hosts):
        held = [r for h in (host, host ^ 1) for r in range(h * per_host, (h + 1) * per_host)]
        lengths = lengths_of(manifest, (r for r in held if r < count))
        states.append(describe_files(host * per_host, FOLDER, raw, lengths))
    return states


def test_the_work_of_rank_0_grows_with_the_hosts():
    def prepare(hosts):
        states = states_of_hosts(hosts, 2)

        def find():
            (found,) = find_snapshots(states, "memory")
            assert found.is_whole
            assert len(found.sources.by_file()) == 4 * hosts

        return find

    assert_linear(prepare)


def store_of(manifest):
    store = MemoryStore()
    for name, data in {MANIFEST: manifest, "other": b"x"}.items():
        if data is not None:
            store.put_if_absent(f"{FOLDER}/{name}", data)
    store.put_if_absent(f"elsewhere/{MANIFEST}", b"x")
    return store


def test_the_manifest_that_most_hosts_have_counts():
    """One that is damaged does not."""
    raws = [seal(make_manifest(2, writer))[0] for writer in ("a", "b")]
    digests = [seal(make_manifest(2, writer))[1] for writer in ("a", "b")]
    damaged = raws[0].replace(b'"step":30', b'"step":31')
    hosts = [raws[1], damaged, raws[0], None, raws[1], damaged, damaged]
    states = [s for rank, raw in enumerate(hosts) for s in take_inventory(store_of(raw), rank)]
    expected = [digests[1], "", digests[0], "", digests[1], "", ""]
    assert [state.digest for state in states] == expected
    (found,) = find_snapshots(states, "memory")
    assert found.digest == digests[1]
    assert found.sources.ranks == [0, 4]
    assert not found.is_whole
