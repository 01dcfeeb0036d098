"""The keywords of other libraries, which people write by habit, and what Limpet has instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

_SAVE_STEPS = "save=, such as save=limpet.EverySteps(500)"
_WORDS = {
    "map_location": 'device=, such as device="cpu"',
    "strict": 'missing="keep", unexpected="ignore" for strict=False',
    "weights_only": "nothing, because a load never runs code",
    "app_state state_dict": "the state: save(url, state), load(url, into=state)",
    "path checkpoint_id directory model_dir save_dir checkpoint_dir": "the URL, as first argument",
    "replicated": "nothing, because what is equal on all ranks is stored once",
    "pg process_group": "group=",
    "storage_options fs": "limpet.open_store(url, **options) as the first argument",
    "obj_out": "into=, such as into=state",
    "max_to_keep keep_checkpoint_max": "keep=, such as keep=limpet.KeepLast(5)",
    "keep_checkpoint_every_n_hours": "keep=, such as keep=limpet.KeepEvery(seconds=7200)",
    "save_interval_steps checkpoint_interval save_checkpoints_steps checkpoint_steps": _SAVE_STEPS,
    "save_checkpoints_secs": "save=, such as save=limpet.EverySeconds(900)",
    "step_counter": 'a limpet.Progress() in the state, such as {"progress": progress}',
    "train_status": 'a member of the state: {"model": model, "train_status": status}',
    "termination_config": "preemption=, such as preemption=limpet.Preemption(grace=30)",
    "termination_watcher_fn": "notices=[limpet.preemption.CallNotice(termination_watcher_fn)]",
    "grace_period": "grace=, in seconds",
}
_LIMPET = {word: ours for words, ours in _WORDS.items() for word in words.split()}


def add_advice(error: TypeError, function: Callable[..., Any], keywords: Iterable[str]) -> None:
    """Add Limpet's words to the error of a call with such keywords, and drop the caller's frame. An
    error that was raised within the function, and so has a second frame, stays as it is."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return
    error.__traceback__ = None
    unknown = [word for word in keywords if word not in signature(function).parameters]
    advice = [f"In place of {word}=, write {_LIMPET[word]}." for word in unknown if word in _LIMPET]
    if advice:
        error.args = (f"{error}. {' '.join(advice)}",)
