"""A test of the zoo, in two processes that are forked from one, which imports the libraries.

    python -m tests.zoo.worker FOLDER GROUP...

``save``: three steps of each training, a save, two more steps. ``resume``: load into a training
that began with other random numbers, and make the same two steps. Each writes ``save.json`` or
``resume.json``: by name, what the state looked like when it was created, when it was saved or
loaded, and at the end, or the error.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import limpet
from limpet.errors import LimpetError
from tests.torchvision_import import make_torchvision_importable
from tests.zoo.training import Training, look_at

MODULES = {
    "torch optimizers": "tests.zoo.torch_states",
    "torch schedulers": "tests.zoo.torch_states",
    "torch modules": "tests.zoo.torch_states",
    **dict.fromkeys(("torchvision", "timm", "transformers", "peft"), "tests.zoo.model_states"),
    **dict.fromkeys(
        ("lightning", "accelerate", "torchmetrics", "schedulefree", "torch_ema", "torchao"),
        "tests.zoo.tool_states",
    ),
}
"""By group: the module with its states."""

APART = Path(__file__).parents[2] / ".zoo"
"""The folder of torchvision and timm, which the Makefile fills and explains."""


def _run(create, path, resume):
    torch.manual_seed(7 if resume else 0)
    training: Training = create()
    created = look_at(training, [])
    if resume:
        limpet.load(path, into=training.state)
    else:
        for i in range(1, 4):
            training.step(i)
        limpet.save(path, training.state, step=3)
    saved = look_at(training, [])
    results = [training.step(i) for i in (4, 5)]
    return {"created": created, "saved": saved, "ended": look_at(training, results)}


def _attempt(create, path, resume):
    try:
        return _run(create, path, resume)
    except LimpetError as e:
        return {"refused": str(e)}
    except Exception:
        return {"error": traceback.format_exc()}


def main(folder, groups):
    if {"torchvision", "timm"} & {*groups}:
        sys.path.append(str(APART))
        make_torchvision_importable()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for group in groups:
        importlib.import_module(MODULES[group])
    for mode in ("save", "resume"):
        if (pid := os.fork()) == 0:
            run_half(mode, folder, groups)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{mode} has failed")


def run_half(mode, folder, groups):
    outcomes: dict[str, Any] = {}
    for group in groups:
        for name, create in importlib.import_module(MODULES[group]).GROUPS[group]().items():
            path = folder / f"{len(outcomes)}" / "version_3"
            outcomes[f"{group}: {name}"] = _attempt(create, path, mode == "resume")
    (folder / f"{mode}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
