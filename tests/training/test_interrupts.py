"""Ctrl-C, or an exception of a signal handler, at every line that starts or ends a save."""

import sys

import pytest
import torch
from torch import nn

import limpet
from limpet.run.policy import EverySteps, OnException
from limpet.run.run import Run
from limpet.saving import pending
from limpet.saving.save import finish_in_background
from limpet.storage.memory import MemoryStore
from limpet.training import checkpointer, saver
from limpet.training.checkpointer import Checkpointer
from tests.trainings import threads_of_trainings

FILES = {m.__file__ for m in (pending, saver, checkpointer)}
START = finish_in_background.__code__


class InterruptLine:
    """A trace function that raises an error at the n-th line of these files."""

    def __init__(self, at, error):
        self.remaining, self.seen, self.error = at, 0, error

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in FILES and frame.f_code is not START:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.remaining:
                raise self.error
        return self


class Training:
    """A training of which one step or save is interrupted at a line."""

    def __init__(self, overlap, raises):
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": limpet.Progress(),
        }
        self.store = MemoryStore()
        self.overlap, self.raises = overlap, raises
        self.weights: dict[int, torch.Tensor] = {}

    def step_model(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 64)).square().mean().backward()
        self.optimizer.step()
        step = self.state["progress"].step + 1
        self.weights[step] = self.model.weight.detach().clone()

    def run(self, call, interrupt):
        policy = EverySteps(2) | OnException()
        with Checkpointer(self.store, self.state, save=policy, overlap=self.overlap) as ckpt:
            for _ in range(3):
                self.step_model()
                ckpt.step()
            if call == "step":
                self.step_model()
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                ckpt.step() if call == "step" else ckpt.save()
            except interrupt.error:
                sys.settrace(before)
                if self.raises:
                    raise
            finally:
                sys.settrace(before)
            for _ in range(3):
                self.step_model()  # an optimizer that waits for a copy must not wait forever
                ckpt.step()
            ckpt.save()

    def check(self, error):
        assert not threads_of_trainings()
        assert not self.optimizer._optimizer_step_pre_hooks
        snapshots = Run(self.store).snapshots()
        last = self.state["progress"].step
        newest = snapshots[-1].step
        if error is None:
            assert newest == last
        elif newest < last - 1:  # before the step was recorded, but after the optimizer stepped
            assert "was not saved" in str(error.__notes__)
        for snapshot in snapshots:
            assert snapshot.verify().ok
            loaded = limpet.load(self.store.at(f"version_{snapshot.step}"))["model"]["weight"]
            assert torch.equal(loaded, self.weights[snapshot.step])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "raises", "overlap", "error"),
    [
        ("step", True, True, KeyboardInterrupt),
        ("save", False, False, SystemExit),
    ],
)
def test_an_interrupt_at_any_line_of_a_saving_call_loses_nothing(call, raises, overlap, error):
    """If the training continues, later saves succeed. If it ends, the last step is saved."""
    at = 0
    while True:
        at += 1
        training, interrupt = Training(overlap, raises), InterruptLine(at, error)
        raised: BaseException | None = None
        try:
            training.run(call, interrupt)
        except error as e:
            assert raises
            raised = e
        training.check(raised)
        if interrupt.seen < at:
            break
    assert at > 60
