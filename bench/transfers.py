"""Save and load with Limpet, and move the same bytes with the bare client of a store, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from bench.report import Verdict, judge
from bench.resource_usage import own_cpu_seconds

COLUMNS = ["", "GiB/s", "range", "client CPU s/GiB", "range"]


class Client(Protocol):
    """The bare client. Both transfers return the digests of the same parts."""

    def upload(self, key: str, data: memoryview) -> list[str]: ...

    def download(self, key: str, into: memoryview) -> list[str]: ...

    def delete(self, key: str) -> None: ...


def take_turns(
    store: Any, client: Client, size: int, rounds: int, *, load: bool, pause: float
) -> dict[str, list[float]]:
    """Return the seconds and CPU seconds of each round, of Limpet and of the bare client.

    ``load``: also read both objects of the round back, and compare them. Each round deletes what
    it has written, and ``pause`` seconds pass before the next one.
    """
    import torch

    import limpet

    flat = torch.randint(0, 255, (size,), dtype=torch.uint8)
    state = {f"w{i:02}": part for i, part in enumerate(flat.split(32 << 20))}
    live = torch.zeros_like(flat)
    live_state = {f"w{i:02}": part for i, part in enumerate(live.split(32 << 20))}
    source, target = memoryview(flat.numpy()), memoryview(live.numpy())
    found: dict[str, list[float]] = {}
    digests: list[str] = []

    def taken(name: str, work: Callable[[], object]) -> None:
        cpu, start = own_cpu_seconds(), time.perf_counter()
        result = work()
        found.setdefault(name, []).append(time.perf_counter() - start)
        found.setdefault(f"{name} cpu", []).append(own_cpu_seconds() - cpu)
        if isinstance(result, list):
            digests[:] = digests or result
            if result != digests:
                raise RuntimeError(f"{name}: other digests")

    def steps(place: Any, key: str) -> dict[str, Callable[[], object]]:
        writes = {
            "save": lambda: limpet.save(place, state, step=1),
            "upload": lambda: client.upload(key, source),
        }
        reads = {
            "load": lambda: limpet.load(place, into=live_state),
            "download": lambda: client.download(key, target),
        }
        return {**writes, **(reads if load else {})}

    for number in range(rounds + 1):
        place, key = store.at(f"version_{number + 1}"), f"bare/{number}"
        for name, work in steps(place, key).items():
            live.zero_()
            taken(name, work)
            if name in ("load", "download") and not torch.equal(live, flat):
                raise RuntimeError(f"{name}: other bytes")
        for stat in list(place.list("")):
            place.delete(stat.key)
        client.delete(key)
        if not number:  # it also creates the connections and buffers
            found.clear()
        else:
            time.sleep(pause)
    return found


def compare(found: dict[str, list[float]], client: str, *, judged: bool) -> list[Verdict]:
    """Return the ratios of both directions. ``client`` is the name of the bare client."""

    def ratios(a: str, b: str) -> list[float]:
        pairs = zip(found.get(a, []), found.get(b, []), strict=True)
        return [x / y for x, y in pairs]

    least, most = (0.9, 1.2) if judged else (None, None)
    verdicts = []
    for ours, bare in (("save", "upload"), ("load", "download")):
        speed, cpu = ratios(bare, ours), ratios(f"{ours} cpu", f"{bare} cpu")
        verdicts += [
            judge(f"{ours}: speed / {bare} with {client}", speed, least=least),
            judge(f"{ours}: CPU time of the client / {bare} with {client}", cpu, most=most),
        ]
    return verdicts


def rows(found: dict[str, list[float]], size: int, client: str) -> list[list[str]]:
    gib = size / 2**30
    rows = []
    for name in ("save", "upload", "load", "download"):
        if name in found:
            seconds, cpu = found[name], found[f"{name} cpu"]
            rows.append(
                [
                    f"{name} with {'Limpet' if name in ('save', 'load') else client}",
                    f"{gib / median(seconds):.2f}",
                    f"{gib / max(seconds):.2f} to {gib / min(seconds):.2f}",
                    f"{median(cpu) / gib:.2f}",
                    f"{min(cpu) / gib:.2f} to {max(cpu) / gib:.2f}",
                ]
            )
    return rows
