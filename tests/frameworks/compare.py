"""``make compare``: trainings that are killed by SIGKILL and resumed, with Limpet and with the
checkpoints of their frameworks. It writes the table of docs/comparison.md."""

import re
import sys
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.forks import describe
from tests.frameworks import harness
from tests.frameworks.harness import Kill, Process

EVERY, STEPS_PER_EPOCH, EPOCHS = 4, 10, 2
"""The trainings save every 4 of 20 steps."""

KILLS = (6, 18)
"""Each is two steps after a checkpoint, within an epoch."""

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- `make compare` writes what follows -->\n", "<!-- the end of that -->\n"
PACKAGES = ("lightning", "transformers", "accelerate", "torchtitan", "torch")


class Case(NamedTuple):
    """``own``: the framework's way to save. ``damage``: of the newest checkpoint after a kill."""

    name: str
    training: str
    own: str
    noise: bool = False
    damage: str = ""


CASES = [
    Case("Lightning", "lightning", "`ModelCheckpoint`"),
    Case("Lightning, random augmentation", "lightning", "`ModelCheckpoint`", noise=True),
    Case("Trainer of Transformers", "transformers", "`save_steps`"),
    Case("Trainer, random augmentation", "transformers", "`save_steps`", noise=True),
    Case("Trainer, newest checkpoint truncated", "transformers", "`save_steps`", damage="truncate"),
    Case("Trainer, one bit of it flipped", "transformers", "`save_steps`", damage="flip"),
    Case("Accelerate", "accelerate", "`save_state`, `skip_first_batches`"),
    Case("torchtitan", "torchtitan", "`CheckpointManager`"),
]


def finish(run, model, optimizer, scheduler):
    """Called by a training at its end: write the state that is compared."""
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = {name: part.state_dict() for name, part in state.items()}
    local = tree_map(lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t, state)
    torch.save(local, f"{run}.final")


def measure(process, case, own, folder):
    """Run a training undisturbed, twice, and killed. Return what the table says of it."""
    is_titan = case.training == "torchtitan"
    module = f"tests.frameworks.compared_{'titan' if is_titan else 'trainings'}"
    function = harness.training(module, f"train_{case.training}")
    options = {"own": own, "noise": case.noise}
    whole, again, run = (folder / name for name in ("whole", "again", "killed"))
    process.run(function, whole, **options)
    process.run(function, again, **options)
    assert compare(whole, again)[0] == 0, f"{case.name}: it differs without a kill"
    for step in KILLS:
        mark = f"validation {step}" if is_titan else f"step {step}"
        process.run(function, run, kill=Kill(mark=mark), **options)
    if case.damage:
        (damage if own else harness.damage)(run, case.damage)
    try:
        output = process.run(function, run, **options)
    except AssertionError as first:
        with pytest.raises(AssertionError) as second:
            process.run(function, run, **options)
        error, again = (error_in(str(e)) for e in (first, second.value))
        assert error == again
        return f"`{error}` at every start"
    differing, count = compare(whole, run)
    found = (
        f"{differing} of {count} leaves differ" if differing else f"all {count} leaves identical"
    )
    if case.damage and own:
        return f"loads it, {found}"
    if case.damage:
        step = int(re.search(r"resumed step (\d+)", output)[1])
        assert step < KILLS[-1] - KILLS[-1] % EVERY
        return f"resumes from the version before it, {found}"
    return found


def compare(whole, killed):
    """Return how many leaves differ, and how many there are."""
    states = [torch.load(f"{run}.final", weights_only=False) for run in (whole, killed)]
    first, second = (dict(describe(state, "")) for state in states)
    assert first.keys() == second.keys()
    return sum(first[key] != second[key] for key in first), len(first)


def error_in(text):
    return re.findall(r"^([\w.]*Error)\b", text, re.MULTILINE)[-1].split(".")[-1]


def damage(folder, how):
    """Damage the newest checkpoint of the Trainer: a file that ends early, or a bit of a weight."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    path = newest / ("optimizer.pt" if how == "truncate" else "model.safetensors")
    content = bytearray(path.read_bytes())
    if how == "truncate":
        content = content[: len(content) // 2]
    else:
        content[-2] ^= 4
    path.write_bytes(content)


def main():
    rows = ["| killed and resumed | with Limpet | without |", "|---|---|---|"]
    for is_titan, group in groupby(CASES, lambda case: case.training == "torchtitan"):
        process = Process(f"tests.frameworks.compared_{'titan' if is_titan else 'trainings'}")
        for case in group:
            with TemporaryDirectory() as ours, TemporaryDirectory() as theirs:
                limpet = measure(process, case, False, Path(ours))
                own = measure(process, case, True, Path(theirs))
            rows.append(f"| {case.name} | {limpet} | {case.own}: {own} |")
            print(rows[-1], flush=True)
        process.close()
    sys.path.append(str(ROOT / ".zoo"))
    releases = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    text = "\n".join(["", *rows, "", f"Measured with {releases}.", "", ""])
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
