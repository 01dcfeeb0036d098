"""Three real processes share their reads. One is killed in the middle of a load."""

import json
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import limpet
from limpet.errors import RankFailed
from limpet.storage.local.store import LocalStore
from limpet.types import BLOCK_SIZE, MIB
from tests.ranks.test_shared_read import (
    CountingStore,
    assert_same_state,
    local_bytes,
    replicated,
    shared_segments,
    stored_bytes,
    without_sharing,
    zeroed,
)
from tests.ranks.world import run_ranks

pytestmark = pytest.mark.slow

SIZE = 3


class SelfKillingStore(CountingStore):
    """Kills its process at the second read from a shard."""

    reads_left = 2

    def get_range(self, key, offset, length, into):
        self.reads_left -= key.endswith(".safetensors")
        if not self.reads_left:
            os.kill(os.getpid(), signal.SIGKILL)
        super().get_range(key, offset, length, into)


def state_of(rank):
    """Return a state with 54 MiB that all ranks have and 10 MiB that only this rank has."""
    rows = torch.full((1024, 2560), rank + 1.0)
    common = {str(seed): replicated(seed=seed) for seed in range(2)}
    sharded = limpet.Boxed(rows, (1024 * rank, 0), (1024 * SIZE, 2560))
    return {**common, "sharded": sharded, "rng": limpet.RNG()}


def run_rank(rank, port, folder):
    """Write the results to ``FOLDER/RANK.json``. Rank 1 kills itself in the last load."""
    store = dist.TCPStore("127.0.0.1", port, SIZE, False)
    dist.init_process_group("gloo", None, timedelta(seconds=60), SIZE, rank, store)
    location, results = folder / "version_1", {}
    state = state_of(rank)
    limpet.save(location, state)
    for share in (False, True):
        store = CountingStore(LocalStore(location))
        live = zeroed({k: v for k, v in state.items() if k != "rng"}) | {"rng": limpet.RNG()}
        began = time.monotonic()
        with nullcontext() if share else without_sharing():
            limpet.load(store, into=live)
        results[f"seconds {share}"] = time.monotonic() - began
        results[f"bytes {share}"] = store.bytes_read(".safetensors")
        results[f"indexes {share}"] = store.bytes_read(".index.json")
        assert_same_state(
            {k: v for k, v in live.items() if k != "rng"}, {k: state[k] for k in live if k != "rng"}
        )
        assert local_bytes(live["sharded"]) == local_bytes(state["sharded"])
    results["leftover segments"] = shared_segments()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    began = time.monotonic()
    try:
        limpet.load(
            (SelfKillingStore if rank == 1 else CountingStore)(LocalStore(location)), into=live
        )
    except RankFailed as e:
        results["killed"] = [e.rank, time.monotonic() - began, e.fields.get("live_state")]
    results["leftover segments after the kill"] = shared_segments()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # the process group would wait for the dead rank


def test_processes_share_reads_and_a_killed_one_leaves_nothing(tmp_path):
    results = run_ranks(run_rank, tmp_path, [0, -signal.SIGKILL, 0], silent_seconds=3, timeout=120)
    data, indexes = stored_bytes(str(tmp_path / "version_1"))
    own = 10 * MIB
    needed = data - 2 * own  # everything except the boxes of the other ranks
    for result in results:  # with sharing, each rank reads its box and a third of the rest
        assert abs(result["bytes False"] - needed) < 100_000
        assert abs(result["bytes True"] - own - (needed - own) / 3) < 2 * BLOCK_SIZE
    assert sum(result["indexes False"] for result in results) == 3 * indexes
    assert sum(result["indexes True"] for result in results) == indexes
    assert abs(sum(result["bytes True"] for result in results) - data) < 100_000
    assert [result["leftover segments"] for result in results] == [[[], 0]] * 3
    for rank in (0, 2):
        failed_rank, seconds, live_state = results[rank]["killed"]
        assert (failed_rank, live_state) == (1, "not valid")
        assert seconds < 10
        assert results[rank]["leftover segments after the kill"] == [[], 0]
    print({key: [result[key] for result in results] for key in ("seconds False", "seconds True")})
