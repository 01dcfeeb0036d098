"""One of three real processes that share their reads: rank ``sys.argv[1]``.

It writes its results to ``FOLDER/RANK.json``. Rank 1 kills itself in the middle of the last load.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import RankFailed
from holdfast.storage.local import LocalStore
from tests.ranks.test_shared_read import (
    CountingStore,
    assert_same_state,
    local_bytes,
    replicated,
    shared_segments,
    zeroed,
)

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
    sharded = holdfast.Boxed(rows, (1024 * rank, 0), (1024 * SIZE, 2560))
    return {**common, "sharded": sharded, "rng": holdfast.RNG()}


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", None, timedelta(seconds=60), SIZE, rank)
    location, results = folder / "version_1", {}
    state = state_of(rank)
    holdfast.save(location, state)
    for share in (False, True):
        store = CountingStore(LocalStore(location))
        live = zeroed({k: v for k, v in state.items() if k != "rng"}) | {"rng": holdfast.RNG()}
        began = time.monotonic()
        holdfast.load(store, into=live, share=share)
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
        holdfast.load(
            (SelfKillingStore if rank == 1 else CountingStore)(LocalStore(location)),
            into=live,
            share=True,
        )
    except RankFailed as e:
        results["killed"] = [e.rank, time.monotonic() - began, e.fields.get("live_state")]
    results["leftover segments after the kill"] = shared_segments()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    time.sleep(2.5 if rank == 0 else 0)  # rank 0 hosts the TCPStore, so the others must end first
    os._exit(0)  # the process group would wait for the dead rank


if __name__ == "__main__":
    main()
