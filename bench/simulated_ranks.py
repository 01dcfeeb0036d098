"""Simulate all ranks except rank 0 in a few processes, with the real messages of each rank.

The library's own code makes the messages of a rank (summary, local plan, tree, receipt) from that
rank's state. They go through a real ``StoreCollective`` and a real TCPStore. Only their order is
artificial: one thread acts for many ranks, one after the other, so only the first of them waits.
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

LEAVES = 978
ROWS, WIDTH = 16, 2048
REPLICAS = 16
SHAPES = {
    "FSDP2": "every leaf split across all ranks",
    "HSDP": f"{REPLICAS} replicas, each split across its ranks",
    "DDP": "all ranks hold the same leaves",
}

_buffer = np.zeros((ROWS, WIDTH), np.float32)


def replicas_of(shape: str, ranks: int) -> int:
    return {"FSDP2": 1, "HSDP": min(REPLICAS, ranks // 2), "DDP": ranks}[shape]


def state_of(rank: int, ranks: int, shape: str) -> dict[str, Any]:
    """Return 978 leaves, and a progress counter, random generators, a step, and a history.

    Two thirds of the leaves are matrices with 128 KiB on each rank; the others are vectors.
    """
    import limpet

    parts = ranks // replicas_of(shape, ranks)
    at = rank % parts

    def leaf(i: int) -> Any:
        if i % 3:
            return limpet.Boxed(_buffer, (at * ROWS, 0), (parts * ROWS, WIDTH))
        return limpet.Boxed(_buffer[0, :64], (at * 64,), (parts * 64,))

    names = [f"layers.{i // 6}.block.{i % 6}.weight" for i in range(LEAVES // 3)]
    each = {name: leaf(i) for i, name in enumerate(names)}
    return {
        "model": each,
        "optimizer": {"exp_avg": dict(each), "exp_avg_sq": dict(each), "step": np.zeros(1)},
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
        "history": [0.5] * 20,
    }


def connect(port: int, counted: bool = True) -> Any:
    """Connect to the store with the library's prefix; optionally count calls and bytes."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=100))
    store = PrefixStore("limpet/0123456789ab", store)
    return CountingStore(store) if counted else store


class CountingStore:
    """A store that counts its calls, and the bytes of keys and values in both directions."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: dict[str, int] = {}
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def do(*given: Any) -> Any:
            found = call(*given)
            self.calls[name] = self.calls.get(name, 0) + 1
            self.nbytes += sum(map(_size, given)) + _size(found)
            return found

        return do

    def pop_counts(self) -> tuple[int, int]:
        """Return the calls and bytes since the last call of this method."""
        calls, nbytes = sum(self.calls.values()), self.nbytes
        self.calls, self.nbytes = {}, 0
        return calls, nbytes


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list) else 8


class SaveCommand(msgspec.Struct):
    """A command of rank 0 to the simulated ranks.

    With ``commit``, they send receipts. With ``write``, they create the files first.
    """

    operation: str
    commit: bool = False
    write: bool = False


class RanksReport(msgspec.Struct):
    """The report of a process of simulated ranks: the seconds until each rank knew what to write,
    and the store calls and bytes of all its ranks."""

    wait_seconds: list[float] = []
    calls: int = 0
    nbytes: int = 0


class _SimulatedRank:
    """One simulated rank. Holds only its encoded messages."""

    def __init__(self, rank: int, ranks: int, shape: str, kv: Any) -> None:
        from limpet.ranks.group import Group
        from limpet.saving.partition import _LocalRank
        from limpet.threads import Workers

        self.rank = rank
        self.group = Group(kv, ranks)
        flat, leaves = flatten_state(rank, ranks, shape)
        local: Any = _LocalRank(flat, leaves, Workers.create())
        self.header = local.make_summary([])
        self.leaf_count = len(leaves)
        self.encoded_parts = (
            local.make_local_plan().to_bytes(),
            local.encode_tree(),
            local.encode_values(),
        )
        self.masks: dict[bytes, Any] = {}
        self.request: Any = None
        self.receipt: Any = None
        self.collective: Any = None

    def details(self, request: Any) -> Any:
        from limpet.saving.partition import Details

        wanted = (request.local_plan_ranks, request.tree_ranks, request.value_ranks)
        told = zip(self.encoded_parts, wanted, strict=True)
        return Details(*(part if self.rank in ranks else b"" for part, ranks in told))


def flatten_state(rank: int, ranks: int, shape: str) -> Any:
    """Flatten the state of a rank as ``save`` does; return the tree and the boxes to distribute."""
    from limpet.saving.partition import _split_leaf
    from limpet.state.flatten import flatten

    flat = flatten(state_of(rank, ranks, shape), rank)
    return flat, [part for leaf in flat.leaves for part in _split_leaf(leaf)]


def run_ranks(port: int, ranks: int, shape: str, first: int, step: int, folder: str) -> None:
    """Simulate the ranks ``first``, ``first + step``, ... until rank 0 sends "end"."""
    from limpet.ranks.kv import KVClient, Timeouts

    class Direct(KVClient):
        """A client without its own thread."""

        def start(self) -> None: ...

        def _call(self, do: Any) -> Any:
            return do()

    orders, store = connect(port, counted=False), connect(port)
    crowd = []
    for rank in range(first, ranks, step):
        board = Direct(store, rank, ranks, Timeouts())
        board._send_heartbeat()
        crowd.append(_SimulatedRank(rank, ranks, shape, board))
    gc.collect()
    gc.freeze()
    store.pop_counts()
    orders.add("simulated/ready", 1)
    for number in range(1, 1000):
        order = _wait_for(orders, f"simulated/order/{number}", SaveCommand)
        if order.operation == "end":
            return
        held_up = _partition(crowd, order.operation)
        if order.commit:
            _commit(crowd, order, ranks, shape, folder, orders, number)
        for each in crowd:
            each.collective.close()
        told = RanksReport(held_up, *store.pop_counts())
        orders.set(f"simulated/told/{number}/{first}", msgspec.json.encode(told))
        orders.add(f"simulated/done/{number}", 1)


def _wait_for(store: Any, key: str, value_type: Any) -> Any:
    while not store.check([key]):
        time.sleep(0.0005)
    return msgspec.json.decode(store.get(key), type=value_type)


def _partition(simulated: list[_SimulatedRank], what: str) -> list[float]:
    """Run ``partition_state`` for many ranks in turn; return the seconds until each was done."""
    from limpet.saving.partition import DetailRequest, Details, RankSummary

    began = time.perf_counter()
    for each in simulated:
        each.collective = each.group.collective(what)
        told = msgspec.structs.replace(each.header, known_plans=list(each.masks))
        each.collective.gather(told, RankSummary)
    held_up = []
    for each in simulated:
        asked = each.request = each.collective.broadcast(None, DetailRequest)
        held_up.append(time.perf_counter() - began)
    if asked.has_requests:
        for each in simulated:
            each.collective.gather(each.details(asked), Details)
    if asked.send_masks:
        held_up = []
        for each in simulated:
            bits = np.frombuffer(each.collective.scatter(None, bytes), np.uint8)
            mask = np.unpackbits(bits, count=each.leaf_count).astype(bool)
            each.masks[asked.plan_id] = mask
            held_up.append(time.perf_counter() - began)
    elif asked.has_requests:
        for each in simulated:
            each.collective.broadcast(None, bool)
    return held_up


def _commit(
    simulated: list[_SimulatedRank],
    command: SaveCommand,
    ranks: int,
    shape: str,
    folder: str,
    orders: Any,
    number: int,
) -> None:
    from limpet.layout.shard_layout import LeafBox
    from limpet.saving.commit import CommitResult, Receipt, pinned_attempt
    from limpet.snapshot.location import locate

    for each in simulated:
        with pinned_attempt(locate(Path(folder)), each.request.attempt, None, each.collective):
            pass  # each rank waits until rank 0 has pinned the attempt
    for each in simulated:
        if command.write:
            _, leaves = flatten_state(each.rank, ranks, shape)
            leaves = [leaves[i] for i in each.masks[each.request.plan_id].nonzero()[0].tolist()]
            holdings = [LeafBox(f.key, f.dtype, f.shape, f.box) for f in leaves]
            sources = [leaf.source for leaf in leaves]
            attempt = each.request.attempt
            each.receipt = write_sparse_shard(
                Path(folder), each.rank, ranks, attempt, sources, holdings
            )
        each.collective.gather(each.receipt, Receipt)
    orders.add(f"simulated/given/{number}", 1)
    for each in simulated:
        each.collective.broadcast(None, CommitResult)


def write_sparse_shard(
    folder: Path, rank: int, ranks: int, attempt: str, sources: list[Any], holdings: list[Any]
) -> Any:
    """Write a sparse shard and a real index; return the receipt of the rank."""
    from limpet.format import names
    from limpet.format.digest import digest
    from limpet.saving.commit import Receipt
    from limpet.saving.image import make_image
    from limpet.saving.write import write_index
    from limpet.snapshot.location import locate

    if rank and not sources:
        return Receipt(rank, None)
    image = make_image(sources, holdings)
    shard = names.shard_name(rank, ranks, attempt)
    index = names.index_name(rank, ranks, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / shard).open("wb") as file:
        file.truncate(image.length)
    digests = [digest(b"%d %d" % (rank, i)) for i in range(len(image.cuts))]
    return Receipt(rank, write_index(locate(folder), index, shard, image, digests))
