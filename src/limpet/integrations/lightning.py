"""Lightning: a callback that saves a training in a run, and resumes it exactly.

A step is counted after all that belongs to it: its validation, the schedulers that need the metrics
of that, and, for the last batch, the end of the epoch. No hook comes so late: ``Versions`` acts
after ``on_advance_end`` of Lightning's loops, which ends a batch and an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.utils.data import DistributedSampler

from limpet.arguments import check_count
from limpet.data.loader import DataLoader, elastic
from limpet.data.progress import Progress
from limpet.errors import LimpetError
from limpet.generators import EPOCH, seed_generators
from limpet.integrations import frameworks
from limpet.integrations.frameworks import StatePart
from limpet.snapshot.location import Url
from limpet.state.replication import Replicated
from limpet.threads import no_op
from limpet.training.checkpointer import Checkpointer

_INSTEAD = {
    **dict.fromkeys(("DeepSpeedStrategy", "FSDPStrategy", "MegatronStrategy"), "FSDP2"),
    **dict.fromkeys(("XLAStrategy", "SingleDeviceXLAStrategy"), "GPUs"),
    **dict.fromkeys(("BatchSizeFinder", "LearningRateFinder"), "a Tuner before fit()"),
    "StochasticWeightAveraging": "WeightAveraging",
}
"""The strategies and callbacks, also as base classes, that are refused, and what to use."""


class Versions(Callback):  # type: ignore[misc]
    """Saves the training of a ``Trainer`` in a run, and resumes it, also within an epoch::

        versions = Versions("runs/a", save=limpet.EverySteps(500), keep=limpet.KeepLast(3))
        Trainer(callbacks=[versions], enable_checkpointing=False).fit(model, loader)

    ``fit`` continues from the newest intact version, with the same batches and random numbers,
    because ``limpet.elastic`` replaces the loaders of the training. ``trainer.global_step`` is the
    step of a version. It has all that Lightning saves, and the metrics that ``self.log`` has
    measured at this step and in the validation after it.

    ``options`` are the arguments of ``Checkpointer``, and ``resume`` those of its ``resume``.
    ``total_batch_size``, the samples of all ranks in a batch, replaces ``batch_size`` of the
    loaders: a resume on another number of ranks is then exact. ``checkpointer`` is None before the
    training begins. ``validate``, ``test``, ``predict``, and ``fast_dev_run`` save nothing.

    Raises ``LimpetError`` before the first step for what cannot be exact: ``ckpt_path``, a second
    ``fit``, some strategies and callbacks, and what ``limpet.elastic`` refuses.
    """

    def __init__(
        self,
        run: Url,
        *,
        total_batch_size: int | None = None,
        resume: Mapping[str, Any] = {},
        **options: Any,
    ) -> None:
        frameworks.check_arguments(options, resume)
        frameworks.check_release("lightning", "2.5", "2.6")
        if total_batch_size is not None:
            check_count("total_batch_size=", total_batch_size)
        self._run, self._total = run, total_batch_size
        self._resume, self._options = resume, options
        self.checkpointer: Any = None
        self._is_open = False
        self._held: dict[str, Any] | None = None  # of the loops, at an end within an epoch
        self._replaced: list[tuple[Any, str]] = []
        self._loaders: list[Any] = []
        self._progress = Progress()
        self._step = self._batches = 0  # the steps that are counted, and the batches since then
        self._logs: dict[str, Any] = {}  # measured since then
        self._known: dict[str, Any] = {}  # at the last look
        self._sums: dict[str, Any] = {}  # of this epoch, loaded, and not continued yet

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._trainer, self._loop = trainer, trainer.fit_loop
        parts = [p for p in (trainer.strategy, *trainer.callbacks) if not _is_of_tuner(p)]
        for name in (kind.__name__ for part in parts for kind in type(part).__mro__):
            if name in _INSTEAD:
                raise LimpetError(f"{name} is refused with Versions: use {_INSTEAD[name]}")
        if self.checkpointer is not None or sum(isinstance(p, Versions) for p in parts) > 1:
            raise LimpetError("Each fit() needs one Versions of its own: create a new one")
        # before the others: they begin with what it loads, and some change the weights at the end
        trainer.callbacks = sorted(  # not in place: Lightning iterates over it
            trainer.callbacks, key=lambda c: c is not self and not _is_of_tuner(c)
        )
        self._loop._combined_loader = None  # setup() of the datamodule may have asked for it
        self._replace(trainer._data_connector, "_prepare_dataloader", self._prepare)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let ``function(original, ...)`` act as a method of an object until the end."""
        setattr(owner, name, partial(function, getattr(owner, name)))
        self._replaced.append((owner, name))

    def _prepare(self, original: Callable[..., Any], loader: Any, shuffle: bool, mode: str) -> Any:
        """Return the loader that Lightning uses: of a training, an elastic one."""
        if mode != "train":
            return original(loader, shuffle=shuffle, mode=mode)
        options: dict[str, Any] = {"total_batch_size": self._total}
        if not isinstance(loader, DataLoader):
            sampler = getattr(loader, "sampler", None)
            place = self._trainer.distributed_sampler_kwargs or {}
            if isinstance(sampler, DistributedSampler):
                place = vars(sampler)
            elif not self._trainer._accelerator_connector.use_distributed_sampler:
                place = {}
            options |= {"rank": place.get("rank", 0), "ranks": place.get("num_replicas", 1)}
        loader = elastic(loader, **options)
        if not self._loaders:
            return loader
        own = self._loaders.pop(0)  # Lightning reloads all, in their order
        self._loaders.append(own)
        if own is not loader:
            own.replace(loader)
        return own

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
        if not trainer.fast_dev_run:
            loop.setup_data()  # before the resume, which gives the loaders their positions
        if trainer.fast_dev_run or loop._combined_loader is None:  # nothing is trained
            return
        for folder in (getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks):
            frameworks.check_folder(self._run, folder, "the dirpath of ModelCheckpoint")
        for folder in (getattr(logger, "root_dir", None) for logger in trainer.loggers):
            # their folders, too, are called version_N
            frameworks.check_folder(self._run, folder, "the folder of a logger", is_error=True)
        self._loaders = [*loop._combined_loader.flattened]
        if len(self._loaders) > 1 and loop._combined_loader._mode == "max_size":
            raise LimpetError(
                'CombinedLoader(mode="max_size") is refused, as a step counts a batch of each'
                ' loader: use "max_size_cycle" or "min_size"'
            )
        self.checkpointer = Checkpointer(self._run, self._state(trainer), **self._options)
        self.checkpointer.__enter__()
        self._is_open = True
        self._replace(batches, "on_run_start", self._begin_epoch)
        self._replace(batches, "on_advance_end", self._end_batch)
        self._replace(loop, "on_advance_end", self._end_epoch)
        if self._options.get("preemption", self) is not None:
            # after SIGTERM, Lightning calls a collective in its handler, and saves nothing
            self._replace(trainer._signal_connector, "register_signal_handlers", lambda _: None)
        is_resumed = self.checkpointer.resume(**self._resume) is not None
        self.checkpointer.state["loops"].check_state_dict = no_op  # saves call it, too
        self._step = trainer.global_step
        self._known = dict(trainer._logger_connector._callback_metrics)
        iter(loop._data_fetcher)  # that of ``setup_data`` is from before the resume
        epochs = loop.epoch_progress.current
        if is_resumed and epochs.processed == epochs.started:  # else the next epoch is skipped
            for part in (loop, batches):
                part._restarting = part._loaded_from_state_dict = False
                part._resuming_from_checkpoint = False
            batches.val_loop._restarting = True  # no sanity check, which resets its counts
            if self._progress.epoch < epochs.processed:  # it was killed before this
                self._count_epoch()
        elif is_resumed:
            frameworks.check_sizes(self._loaders)

    def _state(self, trainer: Any) -> dict[str, Any]:
        callbacks = trainer.callbacks
        own = {"scaler": trainer.precision_plugin, "datamodule": trainer.datamodule}
        self._finetuning = [c for c in callbacks if isinstance(c, BaseFinetuning)]
        others = [c for c in callbacks if c not in self._finetuning]
        stateful = [c for c in others if type(c).state_dict is not Callback.state_dict]
        kinds = {
            "optimizer": trainer.optimizers,
            "scheduler": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loader": self._loaders,
            # of WeightAveraging, whose state_dict() lacks it; the buffers of the ranks differ
            "average": [Replicated(m) for c in callbacks if (m := getattr(c, "_average_model", 0))],
        }
        return {
            "model": trainer.strategy.model,
            # before the loaders and optimizers, which the check may change
            "loops": StatePart(self._read_loops, self._write_loops, self._reload),
            **frameworks.number_members(kinds),
            "progress": self._progress,
            "logs": StatePart(self._read_logs, self._write_logs, keeps_per_rank=True),
            **{n: _part_of(o) for n, o in own.items() if o is not None and o.state_dict()},
            **({"callbacks": {c.state_key: _part_of(c) for c in stateful}} if stateful else {}),
        }

    def _read_loops(self) -> dict[str, Any]:
        trainer, loop, validation = self._trainer, self._loop, self._loop.epoch_loop.val_loop
        state = self._held or loop.state_dict()
        state["state_dict"].pop("combined_loader", None)
        reloaded = [loop._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch]
        return {
            "fit": state,
            "should_stop": trainer.should_stop and not self.checkpointer.should_stop,
            "reloaded": reloaded if trainer.reload_dataloaders_every_n_epochs else [],
            "finetuning": [callback.state_dict() for callback in self._finetuning],
        }

    def _write_loops(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state["fit"])
        self._trainer.should_stop = state["should_stop"]

    def _reload(self, state: dict[str, Any]) -> None:
        """In a resume, get the groups and loaders of the version, before the states are checked."""
        for callback, saved in zip(self._finetuning, state["finetuning"]):
            callback.load_state_dict(saved)
            callback.on_fit_start(self._trainer, self._trainer.lightning_module)
        loop, epochs = self._loop, self._loop.epoch_progress.current
        for part, epoch in zip((loop, loop.epoch_loop.val_loop), state["reloaded"]):
            if epoch >= 0:
                completed, epochs.completed = epochs.completed, epoch
                part._combined_loader = None
                part.setup_data()
                epochs.completed = completed

    def _read_logs(self) -> dict[str, Any]:
        results = self._loop.epoch_loop._results.items()
        sums = {k: {n: getattr(m, n) for n in m._defaults} for k, m in results if not m.has_reset}
        last = dict(self._trainer._logger_connector._callback_metrics)
        return {"last": last, "sums": self._sums | sums}

    def _write_logs(self, state: dict[str, Any]) -> None:
        self._trainer._logger_connector._callback_metrics = state["last"]
        self._loop.epoch_loop._results = results = _Results(training=True)
        results.saved = self._sums = state["sums"]

    # -- after the methods of the loops ------------------------------------------------------------

    def _begin_epoch(self, original: Callable[..., Any], fetcher: Any) -> None:
        original(fetcher)
        self._loop.epoch_loop._restarting = False  # else the last batch would end again
        for callback in self._trainer.callbacks:  # their hook is skipped within an epoch
            if hasattr(callback, "get_accumulate_grad_batches"):
                count = callback.get_accumulate_grad_batches(self._trainer.current_epoch)
                self._trainer.accumulate_grad_batches = count

    def _end_batch(self, original: Callable[..., Any], fetcher: Any) -> None:
        original(fetcher)
        self._logs |= self._measured()
        self._batches += 1
        self._loop._restarting = False  # else plateau schedulers would miss the end of the epoch
        if not self._loop.epoch_loop._num_ready_batches_reached():
            self._count_step()

    def _end_epoch(self, original: Callable[..., Any]) -> None:
        trainer, loop = self._trainer, self._loop
        is_stopped = trainer.should_stop or -1 != trainer.max_steps <= trainer.global_step
        if is_stopped and not loop.epoch_loop._num_ready_batches_reached():
            self._held = loop.state_dict()  # a longer training continues within this epoch
        original()
        if self._held is None:
            self._record(self._measured())
            self._count_step()
            self._count_epoch()

    def _record(self, metrics: dict[str, Any]) -> None:
        """Record metrics with the last step, which may still have to be counted."""
        if self._trainer.global_step > self._step:
            self._logs |= metrics
        else:
            self.checkpointer.metrics(metrics)

    def _count_step(self) -> None:
        steps = self._trainer.global_step - self._step
        if steps:
            metrics, self._logs = self._logs, {}
            batches, self._batches = self._batches, 0
            self._step += steps
            self.checkpointer.step(metrics, steps=steps, batches=batches)
            self._trainer.should_stop |= self.checkpointer.should_stop

    def _count_epoch(self) -> None:
        for loader in self._loaders:
            loader.begin_epoch(loader.epoch + 1)
        if self._batches:  # a save would lack their gradients: the next step saves
            self._batches = 0
            self._progress.end_epoch()
        else:
            self.checkpointer.end_epoch()
            self._trainer.should_stop |= self.checkpointer.should_stop

    def _measured(self) -> dict[str, Any]:
        """Return what was logged since the last look. Lightning also copies earlier values."""
        found = self._trainer._logger_connector._callback_metrics
        new = {name: value for name, value in found.items() if value is not self._known.get(name)}
        caches = {}
        for key, metric in self._loop.epoch_loop._results.items():
            caches[key] = cache = metric._forward_cache
            if cache is not None and cache is self._known.get(key):
                new.pop(metric.meta.name, None)
                new.pop(metric.meta.forked_name(True), None)
        self._known = {**found, **caches}
        return new

    # -- hooks -------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_open and trainer.ckpt_path is not None:  # some strategies load it so late
            raise LimpetError("Versions resumes by itself: remove ckpt_path= from fit()")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_open:
            if self._loop._combined_loader.flattened != self._loaders:
                raise LimpetError(
                    "reload_dataloaders_every_n_epochs= has given another number of loaders"
                )
            seed_generators(self._loaders[0].key, EPOCH, trainer.current_epoch, trainer.global_rank)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_open and not trainer.sanity_checking:
            self._logs |= self._measured()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._is_open and not trainer.sanity_checking:
            self._record(self._measured())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()  # if nothing was left to train, and after a Tuner

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def _close(self, error: BaseException | None = None) -> None:
        while self._replaced:
            delattr(*self._replaced.pop())
        if self._is_open:
            self._is_open = False
            self.checkpointer.__exit__(type(error), error, None)


class _Results(_ResultCollection):  # type: ignore[misc]
    """The logs of an epoch, which continue the sums of before the resume."""

    saved: dict[str, Any]

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, metric)
        vars(metric).update(self.saved.pop(key, {}))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        super().reset(metrics, fx)
        if fx is None:  # the end of the epoch
            self.saved.clear()


def _part_of(owner: Any) -> Any:
    # each rank has the best value of its own metric; of others, Lightning saves those of rank 0
    is_own = hasattr(owner, "monitor")
    part = StatePart(owner.state_dict, owner.load_state_dict, keeps_per_rank=is_own)
    return part if is_own else Replicated(part)


def _is_of_tuner(part: object) -> bool:
    return bool(getattr(part, "_early_exit", False))
