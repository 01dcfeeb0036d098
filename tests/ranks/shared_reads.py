"""Real processes that load together: as rank ``sys.argv[1]`` of three, what it saw to
``FOLDER/RANK.json``. Rank 1 is killed by itself in the middle of the last load."""

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
from tests.ranks.test_shared_read import Counted, emptied, local_bytes, memory, replicated, same

SIZE = 3


class SelfKillingStore(Counted):
    """Ends its process at the so manieth read of a shard."""

    reads_left = 2

    def get_range(self, key, offset, length, into):
        self.reads_left -= key.endswith(".safetensors")
        if not self.reads_left:
            os.kill(os.getpid(), signal.SIGKILL)
        super().get_range(key, offset, length, into)


def state_of(rank):
    """54 MiB that all have, and 10 MiB of one's own."""
    own = torch.full((1024, 2560), rank + 1.0)
    common = {str(seed): replicated(seed=seed) for seed in range(2)}
    at = (1024 * rank, 0)
    return {**common, "cut": holdfast.Boxed(own, at, (1024 * SIZE, 2560)), "rng": holdfast.RNG()}


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", None, timedelta(seconds=60), SIZE, rank)
    place, told = folder / "version_1", {}
    state = state_of(rank)
    holdfast.save(place, state)
    for share in (False, True):
        store = Counted(LocalStore(place))
        live = emptied({k: v for k, v in state.items() if k != "rng"}) | {"rng": holdfast.RNG()}
        began = time.monotonic()
        holdfast.load(store, into=live, share=share)
        told[f"seconds {share}"] = time.monotonic() - began
        told[f"bytes {share}"] = store.of(".safetensors")
        told[f"indexes {share}"] = store.of(".index.json")
        same(
            {k: v for k, v in live.items() if k != "rng"}, {k: state[k] for k in live if k != "rng"}
        )
        assert local_bytes(live["cut"]) == local_bytes(state["cut"])
    told["left"] = memory()
    (folder / f"{rank}.json").write_text(json.dumps(told))
    began = time.monotonic()
    try:
        holdfast.load(
            (SelfKillingStore if rank == 1 else Counted)(LocalStore(place)), into=live, share=True
        )
    except RankFailed as e:
        told["killed"] = [e.rank, time.monotonic() - began, e.fields.get("live_state")]
    told["left after"] = memory()
    (folder / f"{rank}.json").write_text(json.dumps(told))
    time.sleep(2.5 if rank == 0 else 0)  # it has the TCPStore: the others come to their end first
    os._exit(0)  # the process group would wait for who is dead


if __name__ == "__main__":
    main()
