"""The ranks beside rank 0, simulated by few processes: each posts and takes what it really would.

What a rank tells (header, offer, tree, receipt) is made by the library's own code from that rank's
state, and goes through a real ``Assembly`` and a real TCPStore. Only their order is made up: one
thread speaks for many ranks, one after the other, so that no rank but the first ever waits.
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
    "FSDP2": "every leaf cut over all ranks",
    "HSDP": f"{REPLICAS} replicas, each cut over its ranks",
    "DDP": "all ranks hold the same",
}

_buffer = np.zeros((ROWS, WIDTH), np.float32)


def replicas_of(shape: str, ranks: int) -> int:
    return {"FSDP2": 1, "HSDP": min(REPLICAS, ranks // 2), "DDP": ranks}[shape]


def state_of(rank: int, ranks: int, shape: str) -> dict[str, Any]:
    """978 leaves, two thirds of them matrices with 128 KiB on each rank, the others vectors; and
    progress, random generators, a step and a history."""
    import holdfast

    parts = ranks // replicas_of(shape, ranks)
    at = rank % parts

    def leaf(i: int) -> Any:
        if i % 3:
            return holdfast.Boxed(_buffer, (at * ROWS, 0), (parts * ROWS, WIDTH))
        return holdfast.Boxed(_buffer[0, :64], (at * 64,), (parts * 64,))

    names = [f"layers.{i // 6}.block.{i % 6}.weight" for i in range(LEAVES // 3)]
    each = {name: leaf(i) for i, name in enumerate(names)}
    return {
        "model": each,
        "optimizer": {"exp_avg": dict(each), "exp_avg_sq": dict(each), "step": np.zeros(1)},
        "progress": holdfast.Progress(),
        "rng": holdfast.RNG(),
        "history": [0.5] * 20,
    }


def connected(port: int, counted: bool = True) -> Any:
    """A connection to the store: the prefix that the library gives it, and a count of its use."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=100))
    store = PrefixStore("holdfast/0123456789ab", store)
    return Counted(store) if counted else store


class Counted:
    """A store whose calls, and their bytes both ways (keys and values), are counted."""

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

    def taken(self) -> tuple[int, int]:
        """Calls and bytes since this was asked last."""
        calls, nbytes = sum(self.calls.values()), self.nbytes
        self.calls, self.nbytes = {}, 0
        return calls, nbytes


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list) else 8


class Order(msgspec.Struct):
    """What rank 0 wants of the crowd. ``commit``: whether receipts are given; ``write``: and the
    files are made first."""

    what: str
    commit: bool = False
    write: bool = False


class Told(msgspec.Struct):
    """What a process of the crowd says after that: seconds until each rank knew what it writes,
    and calls and bytes of all its ranks."""

    held_up: list[float] = []
    calls: int = 0
    nbytes: int = 0


class _Rank:
    """One of the crowd: what it has to tell, ready; nothing else is kept of it."""

    def __init__(self, rank: int, ranks: int, shape: str, board: Any) -> None:
        from holdfast.engine.distributed.group import Ranks
        from holdfast.engine.saving.partition import _Mine

        self.rank = rank
        self.group = Ranks(board, ranks)
        flat, leaves = taken_apart(rank, ranks, shape)
        mine: Any = _Mine(flat, leaves, None, 1)  # type: ignore[arg-type]
        self.header = mine.header([])
        self.count = len(leaves)
        self.told = mine.offer().to_bytes(), mine.tree(), mine.values()
        self.masks: dict[bytes, Any] = {}
        self.asked: Any = None
        self.receipt: Any = None
        self.meeting: Any = None

    def details(self, asked: Any) -> Any:
        from holdfast.engine.saving.partition import Details

        wanted = (asked.offers, asked.trees, asked.values)
        told = zip(self.told, wanted, strict=True)
        return Details(*(part if self.rank in ranks else b"" for part, ranks in told))


def taken_apart(rank: int, ranks: int, shape: str) -> Any:
    """What ``save`` makes of the state of a rank: the tree, and the boxes to deal out."""
    from holdfast.engine.saving.partition import _split
    from holdfast.engine.state.flatten import flatten

    flat = flatten(state_of(rank, ranks, shape), rank)
    return flat, [part for leaf in flat.leaves for part in _split(leaf)]


def members(port: int, ranks: int, shape: str, first: int, step: int, folder: str) -> None:
    """A process of the crowd: ranks ``first``, ``first + step``, ... until rank 0 says "end"."""
    from holdfast.engine.distributed.kv import Board, Patience

    class Direct(Board):
        """A board without a thread of its own."""

        def start(self) -> None: ...

        def _ask(self, do: Any) -> Any:
            return do()

    orders, store = connected(port, counted=False), connected(port)
    crowd = []
    for rank in range(first, ranks, step):
        board = Direct(store, rank, ranks, Patience())
        board._beat()
        crowd.append(_Rank(rank, ranks, shape, board))
    gc.collect()
    gc.freeze()
    store.taken()
    orders.add("crowd/ready", 1)
    for number in range(1, 1000):
        order = _awaited(orders, f"crowd/order/{number}", Order)
        if order.what == "end":
            return
        held_up = _deal(crowd, order.what)
        if order.commit:
            _commit(crowd, order, ranks, shape, folder, orders, number)
        for each in crowd:
            each.meeting.close()
        told = Told(held_up, *store.taken())
        orders.set(f"crowd/told/{number}/{first}", msgspec.json.encode(told))
        orders.add(f"crowd/done/{number}", 1)


def _awaited(store: Any, key: str, kind: Any) -> Any:
    while not store.check([key]):
        time.sleep(0.0005)
    return msgspec.json.decode(store.get(key), type=kind)


def _deal(crowd: list[_Rank], what: str) -> list[float]:
    """``engine.deal.deal``, of many ranks by turns."""
    from holdfast.engine.saving.partition import Asked, Details, Header, _unpacked

    began = time.perf_counter()
    for each in crowd:
        each.meeting = each.group.meet(what)
        told = msgspec.structs.replace(each.header, plans=list(each.masks))
        each.meeting.gather(told, Header)
    held_up = []
    for each in crowd:
        asked = each.asked = each.meeting.share(None, Asked)
        held_up.append(time.perf_counter() - began)
    if asked.more:
        for each in crowd:
            each.meeting.gather(each.details(asked), Details)
    if asked.deal:
        held_up = []
        for each in crowd:
            each.masks[asked.plan] = _unpacked(each.meeting.scatter(None, bytes), each.count)
            held_up.append(time.perf_counter() - began)
    elif asked.more:
        for each in crowd:
            each.meeting.share(None, bool)
    return held_up


def _commit(
    crowd: list[_Rank], order: Order, ranks: int, shape: str, folder: str, orders: Any, number: int
) -> None:
    from holdfast.engine.saving.commit import Outcome, Receipt
    from holdfast.engine.saving.incremental import held
    from holdfast.engine.saving.partition import holding
    from holdfast.engine.snapshot.location import locate

    for each in crowd:
        with held(locate(Path(folder)), each.asked.attempt, None, each.meeting):
            pass  # rank 0 has pinned the attempt, and each rank has seen that
    for each in crowd:
        if order.write:
            _, leaves = taken_apart(each.rank, ranks, shape)
            leaves = [leaves[i] for i in each.masks[each.asked.plan].nonzero()[0].tolist()]
            holdings = [holding(leaf) for leaf in leaves]
            attempt = each.asked.attempt
            each.receipt = written(Path(folder), each.rank, ranks, attempt, leaves, holdings)
        each.meeting.gather(each.receipt, Receipt)
    orders.add(f"crowd/given/{number}", 1)
    for each in crowd:
        each.meeting.share(None, Outcome)


def written(
    folder: Path, rank: int, ranks: int, attempt: str, leaves: list[Any], holdings: list[Any]
) -> Any:
    """The receipt of a rank that has written its shard (a hole) and its index (a real one)."""
    from holdfast.engine.saving.commit import Receipt
    from holdfast.engine.saving.image import make_image
    from holdfast.engine.saving.write import write_index
    from holdfast.engine.snapshot.location import locate
    from holdfast.format import names
    from holdfast.format.digest import digest
    from holdfast.format.manifest import Increment

    if rank and not leaves:
        return Receipt(rank, None)
    image = make_image(leaves, holdings)
    shard = names.shard_name(rank, ranks, attempt)
    index = names.index_name(rank, ranks, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / shard).open("wb") as file:
        file.truncate(image.length)
    digests = [digest(b"%d %d" % (rank, i)) for i in range(len(image.cuts))]
    vouched = write_index(locate(folder), index, shard, image, digests)
    return Receipt(rank, Increment(shard, image.length, vouched, []), image.length)
