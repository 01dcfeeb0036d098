"""``attach``, for a ``Trainer`` of Transformers or TRL: its class becomes a subclass.

A callback does not get the trainer, and the loop has its position before ``on_train_begin``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from limpet.data.loader import DataLoader, elastic
from limpet.errors import LimpetError
from limpet.integrations import frameworks
from limpet.run.policy import EveryEpoch, EverySteps, KeepBest, KeepLast, KeepPolicy
from limpet.snapshot.location import Url
from limpet.state.replication import Replicated
from limpet.text import warn_user
from limpet.training.checkpointer import Checkpointer

_REFUSED = "auto_find_batch_size", "enable_jit_checkpoint", "ignore_data_skip"
_COUNTS = "epoch", "global_step", "num_input_tokens_seen", "total_flos"
_BEST = "best_metric", "best_global_step"
_LOSSES = "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"
_OF_RANK = "_tr_loss", "current_flos", "_total_train_tokens"  # the last one is of TRL
_POSITION = "epochs_trained", "steps_per_epoch", "is_stopped"
_NO_METRICS = "step", "_runtime", "_per_second", "_time"  # the ends of names


def attach(
    trainer: Trainer, run: Url, *, resume: Mapping[str, Any] | None = None, **options: Any
) -> Trainer:
    """Save the training of ``trainer`` in ``run``, and return the trainer.

    ``trainer.train()`` then resumes exactly, also in the middle of an epoch. The state has the
    model, optimizer, scheduler, scaler, loader (a ``limpet.DataLoader``), ``TrainerState``, and
    callbacks that are ``ExportableState``. The trainer writes no checkpoints of its own.

    ``options`` are arguments of ``Checkpointer``, and ``resume`` those of its ``resume``. If
    ``save=`` and ``keep=`` are not given, the ``TrainingArguments`` decide when to save, and what
    to keep. ``load_best_model_at_end`` loads the best version.

    Raises ``LimpetError`` for a trainer, an engine, or arguments that exclude an exact resume.
    """
    frameworks.check_arguments(options, resume or {})
    if isinstance(trainer, _Attached) or not isinstance(trainer, Trainer):
        raise LimpetError("attach() takes a transformers.Trainer that has no run")
    args, output = trainer.args, trainer.args.output_dir
    frameworks.check_accelerator("attach", trainer.accelerator)
    refused = [f"{name}=True" for name in _REFUSED if getattr(args, name, False)]
    if args.train_sampling_strategy == "batch_rebalance" and args.world_size > 1:
        refused.append("batch_rebalance on several ranks")
    if refused:
        raise LimpetError(f"attach() does not support {refused[0]}")
    frameworks.check_release("transformers", "5.3", "5.24")
    frameworks.check_folder(run, output, "the output_dir")
    trainer.__class__ = type(type(trainer).__name__, (_Attached, type(trainer)), {})
    trainer._limpet_arguments = run, resume or {}, options
    return trainer


class _Training:
    """One call of ``train``: what the hooks of the loop share."""

    loader: DataLoader
    batches: Any  # the pass over the loader
    objective: Any  # the metric of the best version, and its mode
    uncounted, epochs_trained, steps_per_epoch, is_stopped, seconds = 0, 0, 0, False, 0.0

    def __init__(self, trainer: Any, stack: ExitStack) -> None:
        self.trainer, self.stack, self.began = trainer, stack, time.time()
        self.log = list[str]()  # the entries of the log as JSON
        self.restored = dict[str, Any]()  # attributes that the loop sets after the resume
        found = [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
        names = [type(callback).__name__ for callback in found]
        kinds = {name: [c for n, c in zip(names, found) if n == name] for name in names}
        self.callbacks = frameworks.number_members(kinds)

    def resume(self, steps_per_epoch: int, epochs: int) -> tuple[int, int]:
        """Return how many epochs, and batches of the next one, a version has."""
        trainer, (run, arguments, options) = self.trainer, self.trainer._limpet_arguments
        state = {
            "model": trainer.model_wrapped,  # with the buffers of DDP
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
            "loader": self.loader,
            "trainer": Replicated(frameworks.StatePart(self.read, self.write)),
            "rank": frameworks.StatePart(self.read_rank, self.restored.update, keeps_per_rank=True),
        }
        self.steps_per_epoch = steps_per_epoch
        self.ckpt = Checkpointer(run, state, **self.policies() | options)
        self.stack.enter_context(self.ckpt).resume(**arguments)
        is_other = self.steps_per_epoch != steps_per_epoch and trainer.args.max_steps <= 0
        is_complete = trainer.state.global_step >= trainer.state.max_steps and not is_other
        if self.is_stopped or is_complete or self.epochs_trained >= epochs:
            return epochs, 0
        if self.loader.epoch < self.epochs_trained:  # saved just before its epoch was ended
            self.loader.begin_epoch(self.epochs_trained)
        if is_other or self.loader.batches_done % trainer.args.gradient_accumulation_steps:
            raise LimpetError(
                "The steps of an epoch have changed: keep the dataset and the samples of each step"
            )
        return self.epochs_trained, self.loader.batches_done

    def policies(self) -> dict[str, Any]:
        """Return the policies that the arguments of the trainer describe."""
        args, state = self.trainer.args, self.trainer.state
        kind = "eval" if args.save_strategy == "best" else "save"
        strategy, steps = getattr(args, f"{kind}_strategy"), getattr(state, f"{kind}_steps")
        save = {"steps": EverySteps(steps), "epoch": EveryEpoch()}.get(strategy.value)
        keep = KeepPolicy() if args.save_total_limit is None else KeepLast(args.save_total_limit)
        if args.metric_for_best_model is not None and args.eval_strategy != "no":
            metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            self.objective = metric, "max" if args.greater_is_better else "min"
            keep |= KeepBest(1, *self.objective)
        return {"save": save, "keep": keep}

    def read(self) -> dict[str, Any]:
        return {
            "state": {name: getattr(self.trainer.state, name) for name in (*_COUNTS, *_BEST)},
            "log_history": "\n".join(self.log),
            "losses": {name: getattr(self.trainer, name, 0) for name in _LOSSES},
            "callbacks": {name: callback.state() for name, callback in self.callbacks.items()},
            "position": {name: getattr(self, name) for name in _POSITION},
            "seconds": self.seconds + time.time() - self.began,
        }

    def read_rank(self) -> dict[str, Any]:
        found = {n: getattr(self.trainer, n) for n in _OF_RANK if hasattr(self.trainer, n)}
        metrics = self.trainer._metrics if "_total_train_tokens" in found else {}
        return {**found, "metrics": {mode: dict(values) for mode, values in metrics.items()}}

    def write(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        vars(trainer.state).update(state["state"])
        self.log = state["log_history"].splitlines()
        trainer.state.log_history = [*map(json.loads, self.log)]
        self.restored |= state["losses"]
        for name, found in state["callbacks"].items():
            callback = self.callbacks.get(name)
            if callback is None:
                warn_user(f"The trainer has no {name}: its state is not restored", UserWarning)
            elif trainer.args.restore_callback_states_from_checkpoint:  # also its arguments
                vars(callback).update(vars(callback.from_state(found)))
            else:
                vars(callback).update(found["attributes"])
        vars(self).update(state["position"], seconds=state["seconds"])

    def begin_loop(self) -> None:
        self.trainer._tr_loss += self.restored.pop("_tr_loss", 0)  # on its device
        for mode, values in self.restored.pop("metrics", {}).items():
            self.trainer._metrics[mode].update(values)
        vars(self.trainer).update(self.restored)
        self.restored.clear()

    def count(self) -> None:
        """Count the last step, unless that was done, with the metrics that were logged for it."""
        state, found = self.trainer.state, dict[str, Any]()
        for entry in state.log_history[len(self.log) :]:
            self.log.append(json.dumps(entry))
            found |= entry if entry["step"] == state.global_step else {}
        found = {k: v for k, v in found.items() if isinstance(v, float) or type(v) is int}
        metrics = {k: v for k, v in found.items() if not k.endswith(_NO_METRICS)}
        if state.global_step > self.ckpt.current_step:
            batches, self.uncounted = self.uncounted, 0
            self.ckpt.step(metrics, batches=batches)
        elif metrics:
            self.ckpt.metrics(metrics)


class _Attached(Trainer):  # type: ignore[misc]  # it is not typed
    """A trainer that has a run: the hooks of its loop."""

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **more: Any) -> Any:
        if resume_from_checkpoint:
            raise LimpetError("train(resume_from_checkpoint=) is refused: train() resumes its run")
        if trial is not None or self.hp_search_backend is not None:
            raise LimpetError("A hyperparameter search is refused: a run has one training")
        return super().train(**more)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            self._limpet = _Training(self, stack)
            return super()._inner_training_loop(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        if not self.is_in_train:
            return super().get_train_dataloader()
        config = self.accelerator.dataloader_config
        dispatch, config.dispatch_batches = config.dispatch_batches, False
        loader = elastic(super().get_train_dataloader(), seed=self.args.data_seed)
        config.dispatch_batches = dispatch
        # without what Accelerate puts around it, which fetches a batch ahead
        self._limpet.loader = getattr(loader, "base_dataloader", loader)
        return self._limpet.loader

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        super()._init_training_state(max_steps, *args)
        super()._prepare_for_training(max_steps, self._limpet.loader, None)
        return self._limpet.resume(*args[:2])

    def _prepare_for_training(self, max_steps: int, loader: Any, checkpoint: Any) -> Any:
        return self.model_wrapped, loader

    def _run_epoch(self, **kwargs: Any) -> None:
        own = self._limpet
        own.begin_loop()
        own.epochs_trained, own.batches = kwargs["epoch"], iter(own.loader)
        if kwargs["epoch"] == kwargs["epochs_trained"] and own.loader.batches_done:
            # the loop skips as many batches of a loader that nothing reads: see get_batch_samples
            kwargs["train_dataloader"] = torch.utils.data.DataLoader([0])  # type: ignore[arg-type]
            kwargs["resume_from_checkpoint"] = "limpet"
        super()._run_epoch(**kwargs)
        # a training that stops within an epoch continues there, if it gets more steps
        is_over = self.control.should_epoch_stop or not self.control.should_training_stop
        is_over = is_over or next(own.batches, own) is own
        own.batches.close()
        own.epochs_trained += is_over
        is_complete = self.state.global_step >= self.state.max_steps  # until it gets more steps
        own.is_stopped = self.control.should_training_stop and not is_complete
        own.count()
        if is_over:
            own.ckpt.end_epoch()

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        own = self._limpet
        # The last step of an epoch counts after the evaluation that follows. In a stream, it is the
        # one after which there is nothing. The rest of the epoch before counts before a new batch.
        if has_length(own.loader) or own.uncounted > self.args.gradient_accumulation_steps:
            own.count()
        samples, items = super().get_batch_samples(own.batches, *args)
        if samples:
            own.count()
        if own.ckpt.should_stop:
            self.control.should_training_stop, samples = True, []
        own.uncounted += len(samples)
        return samples, items

    def _evaluate(self, *args: Any, skip_scheduler: bool = False) -> Any:
        is_done = skip_scheduler and self.state.global_step > 0  # eval_on_start, before a resume
        return {} if is_done else super()._evaluate(*args, skip_scheduler=skip_scheduler)

    def _save_checkpoint(self, *args: Any) -> None: ...
    def _load_rng_state(self, *args: Any) -> None: ...  # the numbers follow from the position

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        own = self._limpet
        own.begin_loop()
        own.stack.close()  # saves the last step
        if self.args.load_best_model_at_end and (best := own.ckpt.run.best(*own.objective)):
            best.load(into={"model": self.model_wrapped}, keys="model")
        return super()._finalize_training(trial, num_train_samples, start_time - own.seconds)
