"""A CUDA device: how long a save blocks training, with and without ``overlap=True``, and loads.

Not one of the default topics, because most machines have no device: ``make bench ARGS="device
--output build/benchmarks-device.md"``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench import disk, fresh_process
from bench.report import Options, Section, judge, spread

_REPEATS = 7
_EVERY = 8


def _seconds(work: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_blocked(folder: str, size: int) -> dict[str, list[float]]:
    """Return the seconds that saving steps block, and those of one copy to page-locked memory.

    Runs in a child process. All alternate.
    """
    import torch

    import limpet
    from bench import states

    state = {key: value.cuda() for key, value in states.large_state(size).items()}
    pinned = {
        key: torch.empty_like(value, device="cpu").pin_memory() for key, value in state.items()
    }
    pageable = {key: torch.zeros_like(value, device="cpu") for key, value in state.items()}

    def copy(target: dict[str, Any], *, asynchronous: bool) -> None:
        for key, value in state.items():
            target[key].copy_(value, non_blocking=asynchronous)

    found: dict[str, list[float]] = {}
    with limpet.Checkpointer(
        str(Path(folder) / "run"),
        {"model": state},
        save=limpet.EverySteps(1),
        keep=limpet.KeepLast(2),
    ) as checkpointer:
        for _ in range(_REPEATS + 1):
            seconds = {
                "pinned": _seconds(lambda: copy(pinned, asynchronous=True)),
                "pageable": _seconds(lambda: copy(pageable, asynchronous=False)),
                "step": _seconds(checkpointer.step),
                "rest": _seconds(checkpointer.wait),
            }
            for name, value in seconds.items():
                found.setdefault(name, []).append(value)
    return {
        "first": found["step"][:1],
        **{name: values[1:] for name, values in found.items()},
    }


def _training(width: int, layers: int) -> tuple[dict[str, Any], Callable[[], None]]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
            for _ in range(layers)
        )
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(4096, width, device="cuda")

    def step() -> None:
        for _ in range(4):  # gradient accumulation, so that a step takes about 0.1 s
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


def measure_training(folder: str, overlap: bool, quick: bool) -> dict[str, list[float]]:
    """Return the seconds of training steps that no save disturbs, and those that each save adds.

    Runs in a child process. After each save, ``_EVERY`` steps run until the next one.
    """
    import limpet

    state, step = _training(*((1024, 4) if quick else (4096, 12)))
    found: dict[str, list[float]] = {"alone": [], "lost": [], "step": []}
    with limpet.Checkpointer(
        str(Path(folder) / "run"),
        state,
        save=limpet.EverySteps(2 * _EVERY),
        keep=limpet.KeepLast(2),
        overlap=overlap,
    ) as checkpointer:

        def train(steps: int) -> None:
            for _ in range(steps):
                step()
                checkpointer.step()

        train(2 * _EVERY - 1)
        for _ in range(_REPEATS + 1):
            with_save = _seconds(lambda: train(_EVERY))  # its first step saves
            found["step"].append(checkpointer.statistics()["last_blocked_seconds"])
            checkpointer.wait()
            alone = _seconds(lambda: train(_EVERY))
            found["alone"].append(alone / _EVERY)
            found["lost"].append(with_save - alone)
    nbytes = sum(p.nbytes for p in state["model"].parameters()) * 3
    return {**{name: values[1:] for name, values in found.items()}, "bytes": [float(nbytes)]}


def measure_files(folder: str, size: int) -> dict[str, list[float]]:
    """Return the seconds of durable saves from the device and loads onto it, both cold from the
    disk and from memory.

    Runs in a child process.
    """
    import tempfile

    import torch

    import limpet
    from bench import states

    state = {key: value.cuda() for key, value in states.large_state(size).items()}
    live = {key: torch.zeros_like(value) for key, value in state.items()}
    found: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        found.setdefault(name, []).append(_seconds(work))

    def fill(loaded: dict[str, Any]) -> None:
        for key, value in loaded.items():
            live[key].copy_(value)

    def torch_save(path: Path) -> None:
        torch.save(state, path)
        disk.fsync_tree(path)

    def save_safetensors(path: Path) -> None:
        from safetensors.torch import save_file

        save_file(state, path)
        disk.fsync_tree(path)

    def load_safetensors(path: Path) -> None:
        from safetensors.torch import load_file

        fill(load_file(path, device="cuda"))

    libraries: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
        "limpet": (
            lambda path: limpet.save(path, state),
            lambda path: limpet.load(path, into=live),
        ),
        "torch": (torch_save, lambda path: fill(torch.load(path, map_location="cuda"))),
        "safetensors": (save_safetensors, load_safetensors),
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for name, (save, load) in [*libraries.items()] * 3:
            for kind, place in (("disk", Path(folder)), ("memory", Path(memory))):
                path = place / name
                note(f"save, {kind}: {name}", lambda save=save, path=path: save(path))
                if kind == "disk":
                    disk.drop_page_cache(path)
                note(f"load, {kind}: {name}", lambda load=load, path=path: load(path))
                for key, value in live.items():
                    if not torch.equal(value, state[key]):
                        raise ValueError(f"{name} loaded wrong values for {key}")
                    value.zero_()
                disk.remove(path)
    raw = disk.aligned_memory(size)
    for _ in range(3):
        found.setdefault("raw write", []).append(disk.time_raw_write(Path(folder) / "raw", raw, 4))
        found.setdefault("raw read", []).append(disk.time_raw_read(Path(folder) / "raw", raw, 4))
    return found


def _blocked_section(found: dict[str, list[float]], size: int) -> Section:
    title = f"CUDA: asynchronous save of {size >> 20} MiB: time that step() blocks"
    text = (
        "The baselines copy the same tensors to page-locked memory (one asynchronous copy per"
        " tensor) and to pageable memory. All alternate in one process, from the second save on."
    )
    gib = size / 2**30
    verdicts = [
        judge(
            "blocked / copy to page-locked memory",
            [a / b for a, b in zip(found["step"], found["pinned"], strict=True)],
            most=1.2,
        ),
        judge(
            "blocked / copy to pageable memory",
            [a / b for a, b in zip(found["step"], found["pageable"], strict=True)],
        ),
    ]
    for name, label in (
        ("pinned", "copy to page-locked memory"), ("pageable", "copy to pageable memory"),
        ("step", "step() that saves"), ("rest", "the rest of the save, in the background"),
        ("first", "the first step() that saves"),
    ):  # fmt: skip
        verdicts.append(
            judge(label, [1000 * s / gib for s in found[name]], unit="ms/GiB", digits=1)
        )
    return Section(title, text, verdicts)


def _training_section(found: dict[bool, dict[str, list[float]]]) -> Section:
    size = found[True]["bytes"][0] / 2**30
    title = f"CUDA: training during saves, {size:.1f} GiB of parameters and AdamW slots"
    text = (
        f"A save after every {_EVERY}th step. The loss is the time of {_EVERY} steps with a save"
        f" minus that of the {_EVERY} steps after it without one. With overlap=True, parameters"
        " and slots are copied while the next forward and backward pass runs."
    )
    verdicts = []
    for overlap, values in found.items():
        label = f"overlap={overlap}"
        step = values["alone"]
        verdicts += [
            judge(f"{label}: training step without a save", [1000 * s for s in step], unit="ms"),
            judge(
                f"{label}: step() that saves blocks", [1000 * s for s in values["step"]], unit="ms"
            ),
            judge(f"{label}: time lost to a save", [1000 * s for s in values["lost"]], unit="ms"),
        ]
    ratios = [a / b for a, b in zip(found[True]["lost"], found[False]["lost"], strict=True)]
    verdicts.append(judge("time lost: overlap=True / overlap=False", ratios))
    return Section(title, text, verdicts)


def _files_section(found: dict[str, list[float]], size: int) -> Section:
    title = f"CUDA: durable save from the device and load onto it, {size >> 20} MiB"
    text = (
        "Seconds until the file is synced, or until the live tensors on the device are filled. The"
        " pages of files on the disk are dropped before the load; memory is a tmpfs. Only Limpet"
        " computes and checks digests. The raw baseline writes and reads with O_DIRECT and 4"
        " threads, without a device."
    )
    verdicts = []
    for kind in ("save, disk", "load, disk", "save, memory", "load, memory"):
        peers = zip(
            found[f"{kind}: torch"], found[f"{kind}: safetensors"], found[f"{kind}: limpet"],
            strict=True,
        )  # fmt: skip
        ratios = [min(a, b) / c for a, b, c in peers]
        verdicts.append(judge(f"{kind}: speed / fastest other library", ratios, least=1.0))
    rows = [[name, f"{median(values):.2f}", spread(values)] for name, values in found.items()]
    return Section(title, text, verdicts, columns=["what", "s", "range"], rows=rows)


def sections(options: Options) -> list[Section]:
    import torch

    if not torch.cuda.is_available():
        reason = ["this machine has no CUDA device"]
        return [Section("CUDA", "Saves from a device and loads onto it.", [], missing=reason)]
    name = torch.cuda.get_device_name()
    place, made = options.folder / "device", []

    def call(function: str, **arguments: Any) -> dict[str, Any]:
        place.mkdir(exist_ok=True)
        try:
            return fresh_process.call(f"bench.device:{function}", folder=str(place), **arguments)
        finally:
            disk.remove(place)

    size = options.medium
    made.append(_blocked_section(call("measure_blocked", size=size), size))
    trained = {each: call("measure_training", overlap=each, quick=options.quick)
               for each in (False, True)}  # fmt: skip
    made.append(_training_section(trained))
    made.append(_files_section(call("measure_files", size=size), size))
    for section in made:
        section.text += f" Device: {name}."
    return made
