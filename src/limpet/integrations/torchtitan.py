"""``torchtitan``: a checkpoint manager whose saves and resumes are those of ``Checkpointer``."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torchtitan.components.checkpointer import base, utils
from torchtitan.tools import filesystem

from limpet.data.progress import Progress
from limpet.errors import LimpetError
from limpet.generators import digest
from limpet.integrations.frameworks import StatePart, check_arguments, check_release
from limpet.lazy_torch import rank_and_world_size
from limpet.run.policy import AtSteps, EverySteps, KeepLast, Never
from limpet.threads import no_op
from limpet.training.checkpointer import Checkpointer

_REFUSED = {  # options, each with what to do instead
    "initial_load_in_hf": "import the weights, and pass that version as initial_load_path",
    "last_save_model_only": "a version has the whole state, and `limpet export` takes the model",
    "create_seed_checkpoint": "save the model by limpet.save, and pass that as initial_load_path",
}


class LimpetManager(base.BaseCheckpointManager):
    """Saves a training of torchtitan as versions of a run, and resumes it exactly::

        checkpoint=LimpetManager.Config(enable=True, interval=500, keep_latest_k=3)

    The run is ``folder``; an empty one begins with the version ``initial_load_path``. ``options``
    are more arguments of ``Checkpointer``. Each step seeds the generators, alike for equal layers.
    """

    epoch = 0  # torchtitan counts only steps
    step = property(lambda self: self._trainer.step)
    _maybe_wait_for_staging = no_op  # ``_save`` returns when the state may change

    @dataclass(kw_only=True, slots=True)
    class Config(base.BaseCheckpointManager.Config):
        last_save_model_only: bool = False
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

    def __init__(self, config: Config, *, states: dict[str, Any], **built: Any) -> None:
        self.enable, self.save_future = config.enable, Future[None]()  # one may always be in flight
        if not self.enable:
            return
        check_release("torchtitan", "0.3", "0.3")
        check_arguments(config.options, {})
        for name, advice in _REFUSED.items():
            if getattr(config, name):
                raise LimpetError(f"LimpetManager needs checkpoint.{name}=False: {advice}")
        self._config, self._trainer, parts = config, states[base.TRAIN_STATE], built["model_parts"]
        loader = built["dataloader"]
        state = {
            base.MODEL: parts[0] if len(parts) == 1 else parts,
            base.OPTIMIZER: list(built["optimizers"].optimizers),
            base.LR_SCHEDULER: built["lr_schedulers"],
            base.DATALOADER: None if loader is None else self._attach(loader),
            **states,
        }
        for name in config.exclude_from_loading:
            if name not in (base.DATALOADER, base.LR_SCHEDULER):
                raise LimpetError(
                    f"checkpoint.exclude_from_loading cannot have {name!r}, only the dataloader and"
                    " lr_scheduler: initial_load_path can load a model alone"
                )
            state[name] = StatePart(state[name].state_dict, no_op)
        self._place = digest(utils.canonical_fqn(next(parts[0].named_parameters())[0]))
        first = 1 if config.enable_first_step_checkpoint else config.interval
        self._ckpt = Checkpointer(
            filesystem.join(built.get("base_folder", ""), config.folder),
            state | {"progress": Progress(self)},
            save=Never() if config.load_only else EverySteps(config.interval) | AtSteps([first]),
            keep=KeepLast(config.keep_latest_k) if config.keep_latest_k else None,
            at_end=False,  # at the end of the data, the trainer has counted a step that it cancels
            **config.options,
        )

    def _attach(self, loader: Any) -> StatePart:
        """Seed the steps of a loader. Return its states by ranks, among which it finds its own."""
        original, load, rank = type(loader), loader.load_state_dict, str(rank_and_world_size()[0])

        def iterate(loader: Any) -> Iterator[Any]:
            batches, seeded = original.__iter__(loader), None  # a loader may draw as it begins
            while True:
                if seeded != self.step:
                    seeded = self.step
                    self._ckpt._step_counter.seed_step(self._place)
                if (batch := next(batches, loader)) is loader:
                    return
                yield batch

        loader.__class__ = type(original.__name__, (original,), {"__iter__": iterate})
        return StatePart(
            lambda: {rank: loader.state_dict()},
            lambda states: load(dict(ChainMap(states.get(rank, {}), *states.values()))),
        )

    def _load(self, step: int = -1) -> bool:
        start = self._config.initial_load_path if step == -1 else None
        keys = base.MODEL if start and self._config.initial_load_model_only else None
        return self._ckpt.resume(None if step == -1 else step, start=start, keys=keys) is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._ckpt.step()
        if last_step and not self._config.load_only:
            self._ckpt.save()
        return self._ckpt._saver.begun_step == curr_step

    def _wait_for_saving(self) -> None:
        self._ckpt.wait()

    def _close(self) -> None:
        self._ckpt.close()
