"""Lay out the checkpoints from which Accelerate, Transformers, and Lightning resume a training.

They consist of the model and of the optimizers, schedulers, and gradient scalers at the top level
of the state. What these libraries keep in other forms, such as random generators and the position
in the data, is not written. Each library then begins with its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from limpet.errors import Unsupported
from limpet.exporting.output_layout import (
    SINGLE_FILE,
    OutputFile,
    OutputTensor,
    Record,
    plan_hf_files,
    plan_record,
    plan_safetensors_file,
    plan_sidecar,
    plan_text,
    plan_torch_file,
)
from limpet.exporting.torch_pickle import TorchPickle, make_pickle
from limpet.format import tree
from limpet.interop.members import role_of_fields
from limpet.loading.bind_optimizer import is_optimizer_node
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list

TRAINING_KINDS = ("accelerate", "transformers", "lightning")
"""The kinds of exports from which a library resumes."""

_LIGHTNING_VERSION = "2.0.0"
"""The first release that reads the layout written here. Later releases migrate it, if needed."""

_TRAINER_INTERVAL = 500
"""The default of the Trainer. After a resume, it uses the intervals of the checkpoint."""

_MAX_LISTED = 20


@dataclass(slots=True)
class TrainingMembers:
    """The members of a state that are exported, each as its node and its key.

    ``left_out``: the keys of all other members. ``epoch``: that of a ``Progress``, if there is one.
    """

    optimizers: list[tuple[Any, str]] = field(default_factory=list)
    schedulers: list[tuple[Any, str]] = field(default_factory=list)
    scalers: list[tuple[Any, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    epoch: int | None = None


@dataclass(slots=True)
class TrainingFiles:
    """The files of an export, and the tensors in those besides the model. ``refused``: the keys of
    values that cannot be written, each with a description. ``left_out``: as ``TrainingMembers``."""

    files: list[OutputFile] = field(default_factory=list)
    tensors: list[OutputTensor] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add_pickle(self, name: str, pickled: TorchPickle) -> None:
        leaves = pickled.snapshot.leaves
        tensors = [OutputTensor(key, key, *leaves[key]) for key in pickled.tensors]
        self.refused |= pickled.refused
        if not pickled.refused:
            self.files.append(plan_torch_file(name, pickled.to_bytes(), tensors))
            self.tensors += tensors


def find_members(snapshot: SnapshotReader, model_key: str) -> TrainingMembers:
    """Find the optimizers, schedulers, and scalers at the top level of a snapshot's state."""
    found = TrainingMembers()
    for node, key in tree.members(snapshot.manifest.tree, "") or ():
        is_dict = type(node) is dict and not {"dict", "ordered", "items"}.isdisjoint(node)
        children = {n: (c, k) for n, c, k in tree.children(node, key)} if is_dict else {}
        if key == model_key:
            continue
        role = "optimizer" if is_dict and is_optimizer_node(children) else role_of_fields(children)
        if role == "optimizer":
            found.optimizers.append((node, key))
        elif role == "scheduler":
            found.schedulers.append((node, key))
        elif role == "scaler":
            found.scalers.append((node, key))
        else:
            found.left_out.append(key)
            if {"epoch", "step", "samples"} <= children.keys():
                found.epoch = tree.decode(*children["epoch"], tree.reject_value)
    return found


def plan_training_files(
    snapshot: SnapshotReader,
    kind: str,
    model: tuple[Any, str],
    tensors: Sequence[OutputTensor],
    max_shard_size: float,
    file_name: str | None,
    record: Record,
) -> TrainingFiles:
    """Plan the files of one of ``TRAINING_KINDS``.

    ``model``: its node and its key; ``tensors``: those in it. Raises ``Unsupported`` if the state
    lacks what the library needs, and ``LimpetError`` if torch is not installed.
    """
    members = find_members(snapshot, model[1])
    _require(snapshot, kind, members)
    _require_one_model(snapshot, kind, model[1], members)
    planned = TrainingFiles(left_out=members.left_out)
    if kind == "lightning":
        pickled = make_pickle(snapshot)
        pickled.value = _lightning_content(snapshot, pickled, model, members)
        planned.add_pickle(file_name or "last.ckpt", pickled)
        if record is not None:
            planned.files += [plan_sidecar(file, record) for file in planned.files]
    else:
        if kind == "transformers":
            planned.files += plan_hf_files(tensors, max_shard_size, record)
            text = json.dumps(_trainer_state(snapshot, members), indent=2) + "\n"
            suffix = ".pt"
        else:  # safetensors.torch.load_model accepts each tied tensor under one name only
            first_names = list({t.key: t for t in reversed(tensors)}.values())[::-1]
            planned.files.append(plan_safetensors_file(SINGLE_FILE, first_names, record))
            text, suffix = "", ".bin"
        named = [
            ("optimizer", suffix, members.optimizers),
            ("scheduler", suffix, members.schedulers),
        ]
        for name, end, nodes in [*named, ("scaler", ".pt", members.scalers)]:
            for number, (node, key) in enumerate(nodes):
                pickled = make_pickle(snapshot)
                pickled.value = pickled.build(node, key)
                planned.add_pickle(f"{name}{f'_{number}' if number else ''}{end}", pickled)
        if text:
            planned.files.append(plan_text("trainer_state.json", text.encode()))
    if record is not None and kind != "lightning":
        others = [f.name for f in planned.files if not f.name.startswith("model")]
        planned.files.append(plan_record(others, record))
    return planned


def _require(snapshot: SnapshotReader, kind: str, members: TrainingMembers) -> None:
    """Raise ``Unsupported`` if the state lacks what a library needs to resume."""
    counts = {
        "an optimizer": len(members.optimizers),
        "a scheduler": len(members.schedulers),
        "a gradient scaler": len(members.scalers),
    }
    needed = {"an optimizer": counts["an optimizer"] > 0}
    if kind == "transformers":
        needed = {name: counts[name] == 1 for name in ("an optimizer", "a scheduler")}
    needed["a gradient scaler"] = counts["a gradient scaler"] <= 1
    needed["a step"] = snapshot.step is not None or kind == "accelerate"
    lacking = [name for name, fits in needed.items() if not fits]
    if lacking:
        found = [f"{n} x {name.split(' ', 1)[1]}" for name, n in counts.items()]
        raise Unsupported(
            f"{kind.capitalize()} could not resume from {snapshot.url}: the top level of its state"
            f" does not have exactly what it needs of {format_list(lacking, _MAX_LISTED)}",
            expected="exactly one optimizer and one scheduler, at most one gradient scaler, and a"
            " step"
            if kind == "transformers"
            else "one optimizer or more, and at most one gradient scaler",
            found=f"{format_list(found, _MAX_LISTED)}; step {snapshot.step}",
            todo="Export the weights with --to hf or safetensors, or the whole state with --to"
            " torch",
        )


def _require_one_model(
    snapshot: SnapshotReader, kind: str, model_key: str, members: TrainingMembers
) -> None:
    """Raise ``Unsupported`` if an optimizer trains parameters that are not those of the model."""
    prefix = model_key.replace("/", ".") + "."
    for node, key in members.optimizers:
        children = {n: (c, k) for n, c, k in tree.children(node, key)}
        groups = tree.decode(*children["groups"], lambda *_: None) if "groups" in children else []
        outside = [n for group in groups for n in group["params"] if not n.startswith(prefix)]
        if outside:
            raise Unsupported(
                f"A checkpoint for {kind} would be incomplete: the optimizer at {key} in"
                f" {snapshot.url} trains parameters outside of {model_key}",
                expected=f"parameters of {model_key}",
                found=format_list(outside, _MAX_LISTED),
                todo="Give the key of the whole model with --root KEY (root=); or export the whole"
                " state with --to torch",
                leaf=key,
            )


def _trainer_state(snapshot: SnapshotReader, members: TrainingMembers) -> dict[str, Any]:
    """Return the ``trainer_state.json`` of Transformers. The Trainer computes what is not here, and
    the position in the data from the step."""
    epoch = None if members.epoch is None else float(members.epoch)
    return {
        "global_step": snapshot.step,
        "epoch": epoch,
        # not known: the Trainer compares them with its own, and warns
        "train_batch_size": 0,
        **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), _TRAINER_INTERVAL),
        "log_history": [],
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
    }


def _lightning_content(
    snapshot: SnapshotReader,
    pickled: TorchPickle,
    model: tuple[Any, str],
    members: TrainingMembers,
) -> dict[str, Any]:
    """Return the content of a checkpoint of Lightning, which begins at the start of its epoch."""
    step, epoch = snapshot.step or 0, members.epoch or 0
    build: Callable[[Any, str], Any] = pickled.build
    content = {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": _LIGHTNING_VERSION,
        "state_dict": build(*model),
        "loops": {"fit_loop": _fit_loop(step, epoch)},
        "callbacks": {},
        "optimizer_states": [build(*m) for m in members.optimizers],
        "lr_schedulers": [build(*m) for m in members.schedulers],
    }
    if members.scalers:
        content["MixedPrecision"] = build(*members.scalers[0])
    return content


def _fit_loop(step: int, epoch: int) -> dict[str, Any]:
    """Return the progress of Lightning's fit loop after ``step`` optimizer steps, at the start of
    the epoch ``epoch``."""

    def counted(n: int, *more: str) -> dict[str, int]:
        return dict.fromkeys(("ready", "completed", *more), n)

    def progress(n: int, current: int, *more: str) -> dict[str, Any]:
        return {"total": counted(n, *more), "current": counted(current, *more)}

    loop = "epoch_loop."
    return {
        "state_dict": {},
        "epoch_progress": progress(epoch, epoch, "started", "processed"),
        f"{loop}state_dict": {"_batches_that_stepped": step},
        f"{loop}batch_progress": progress(step, 0, "started", "processed")
        | {"is_last_batch": False},
        f"{loop}automatic_optimization.optim_progress": {
            "optimizer": {"step": progress(step, 0), "zero_grad": progress(step, 0, "started")}
        },
        f"{loop}manual_optimization.optim_step_progress": progress(step, 0),
    }
