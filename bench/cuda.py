"""What staging from a CUDA device costs: run by hand where there is one.

Prints the median of several runs: bytes from device to host, the time that an asynchronous save blocks, and
loading back into live tensors on the device.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

import holdfast
from holdfast.policy import EverySteps, KeepLast

GIB = 1 << 30


def median(runs: int, work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds: median, least and most of ``runs``, after one run that does not count."""
    seconds = []
    for i in range(runs + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), min(seconds), max(seconds)


def main() -> None:
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 8.0
    count = int(size * 16)
    state = {f"t{i}": torch.randn(16 << 20, device="cuda") for i in range(count)}  # 64 MiB each
    nbytes = sum(t.nbytes for t in state.values())
    pinned = torch.empty(16 << 20, pin_memory=True)
    pageable = torch.zeros(16 << 20)

    def tell(what: str, seconds: tuple[float, float, float]) -> None:
        middle, least, most = seconds
        rate = nbytes / GIB / middle
        print(
            f"{what:48} {middle:7.3f} s ({least:.3f} to {most:.3f})  {rate:6.2f} GiB/s", flush=True
        )

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {nbytes / GIB:.1f} GiB")
    tell("device to pinned memory", median(3, lambda: [pinned.copy_(t) for t in state.values()]))
    tell(
        "device to pageable memory", median(3, lambda: [pageable.copy_(t) for t in state.values()])
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with holdfast.Checkpointer(folder, state, save=EverySteps(1), keep=KeepLast(1)) as ckpt:
            blocked = []
            for _ in range(4):
                ckpt.step()
                blocked.append(ckpt.statistics()["last_blocked_seconds"])
                ckpt.wait()
            later = blocked[1:]
            tell("asynchronous save: blocked, first", (blocked[0],) * 3)
            tell(
                "asynchronous save: blocked, later",
                (statistics.median(later), min(later), max(later)),
            )
            tell(
                "asynchronous save: background", (ckpt.statistics()["background_seconds"] / 4,) * 3
            )
            url = f"{folder}/version_4"
            tell(
                "load into live tensors on the device",
                median(3, lambda: holdfast.load(url, into=state)),
            )


if __name__ == "__main__":
    main()
