"""Topic 15: a save to a local disk first, with a run in a store that is slower."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from bench import fresh_process
from bench.report import Options, Section, judge

_REPEATS = 5
_BYTES_PER_SECOND = 200 * 10**6


class _SlowLink:
    """Lets so many bytes pass per second, whatever the number of threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free_at = 0.0

    def pass_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / _BYTES_PER_SECOND
            at = self._free_at
        time.sleep(max(0.0, at - time.monotonic()))


def _start(folder: Path, state: Any, has_tier: bool) -> Any:
    """Return a training whose run is in a store at the end of a slow link, on a disk."""
    import limpet
    from limpet.storage.local.store import LocalStore

    link = _SlowLink()

    class SlowStore(LocalStore):
        def put(self, key: str, length: int, head: int = 0) -> Any:
            upload = super().put(key, length)
            write: Any = upload.write_at

            def write_at(offset: int, *data: memoryview) -> None:
                link.pass_bytes(sum(len(view) for view in data))
                write(offset, *data)

            upload.write_at = write_at  # type: ignore[method-assign]
            return upload

        def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
            link.pass_bytes(length)
            super().get_range(key, offset, length, into)

    return limpet.Checkpointer(
        SlowStore(folder / "run", direct=True),
        {"model": state},
        save=limpet.EverySteps(1),
        tiers=[limpet.LocalTier(folder / "disk")] if has_tier else [],
        preemption=None,
    )


def measure_save(folder: str, size: int, has_tier: bool) -> NoReturn:
    """Report the seconds until a kill loses nothing, and until the version is in the run. Then the
    process ends as one that is killed: a training that ends itself deletes its local versions."""
    from bench import states

    ckpt = _start(Path(folder), states.large_state(size), has_tier)
    began = time.perf_counter()
    ckpt.step()
    ckpt._saver.wait_for_turn()
    safe = time.perf_counter() - began
    ckpt.wait()
    fresh_process.reply_and_die({"safe": safe, "run": time.perf_counter() - began})


def measure_resume(folder: str, size: int, has_tier: bool) -> dict[str, float]:
    """Return the seconds of ``resume`` in another process."""
    from bench import states

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _start(Path(folder), states.large_state(size), has_tier) as ckpt:
            began = time.perf_counter()
            snapshot = ckpt.resume()
            resumed = time.perf_counter() - began
            if snapshot is None or (str(Path(folder) / "disk") in snapshot.url) != has_tier:
                raise RuntimeError(f"resumed from {snapshot}")
    return {"resume": resumed}


def sections(options: Options) -> list[Section]:
    size = options.medium // 2
    title = f"A save of {size >> 20} MiB to a local disk first (LocalTier)"
    text = (
        f"The run is in a store behind a link of {_BYTES_PER_SECOND / 1e6:.0f} MB/s, simulated on"
        " this disk. In turn, a training saves to it directly, and to the local disk first. A kill"
        " loses nothing once the version is complete on the local disk, or else in the run."
    )
    folder = options.folder / "local-tier"
    folder.mkdir()
    found: dict[str, list[float]] = {}
    missing = []
    try:
        for repeat in range(_REPEATS):
            for name in ("direct", "local"):
                place = folder / f"{name}-{repeat}"
                given = {"folder": str(place), "size": size, "has_tier": name == "local"}
                taken = fresh_process.call("bench.local_tier:measure_save", **given)
                taken |= fresh_process.call("bench.local_tier:measure_resume", **given)
                for figure, seconds in taken.items():
                    found.setdefault(f"{name} {figure}", []).append(seconds)
                shutil.rmtree(place)
    except fresh_process.MeasurementFailed as failure:
        missing.append(f"limpet: {failure}")
    finally:
        shutil.rmtree(folder)

    def ratios(figure: str) -> list[float]:
        pairs = zip(
            found.get(f"direct {figure}", []), found.get(f"local {figure}", []), strict=True
        )
        return [direct / local for direct, local in pairs]

    verdicts = [
        judge("direct / local: until a kill loses nothing", ratios("safe"), least=3),
        judge("direct / local: until the version is in the run", ratios("run"), least=0.8),
        judge("direct / local: resume", ratios("resume"), least=3),
        *(judge(name, values, unit="s") for name, values in found.items()),
    ]
    return [Section(title, text, verdicts, missing=missing)]
