"""Early stopping by scores that are given to the training, or recorded by evaluations."""

from __future__ import annotations

import pytest

from holdfast.run.policy import EverySteps, KeepLast, StopWhen
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.training.checkpointer import Checkpointer
from tests.trainings import initial_state, train

pytestmark = pytest.mark.filterwarnings("error")


def test_four_worsening_scores_of_a_separate_job_stop_the_training() -> None:
    store, state = MemoryStore(), initial_state()
    evaluator = Run(store)
    stop = StopWhen("val_loss", patience=3)
    with Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(3), stop=stop) as ckpt:
        for step in range(1, 10):
            train(state, ckpt, step)
            if ckpt.should_stop:
                break
            ckpt.wait()
            if step <= 4:
                evaluator.add_metrics(step, {"val_loss": float(step)})
        assert ckpt.should_stop
        assert 5 <= state["progress"].step <= 7
