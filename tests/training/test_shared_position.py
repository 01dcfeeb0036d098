"""Two open Checkpointers of different runs must not count in one object."""

import gc

import pytest
import torch

import limpet
from limpet.errors import LimpetError, UnsavedSteps
from limpet.storage.memory import MemoryStore

POSITIONS = {"progress": limpet.Progress, "loader": lambda: limpet.DataLoader(range(8), 2)}


def checkpointer(state, run=None):
    return limpet.Checkpointer(MemoryStore() if run is None else run, state, quiet=True)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("make", POSITIONS.values(), ids=POSITIONS)
def test_a_second_run_with_the_same_position_is_refused(make, is_function, nested):
    """Both models of a GAN, each with a Checkpointer, and one Progress: two steps for one."""
    position = make()
    first = {"w": torch.ones(1), "position": position}
    second = {"w": torch.ones(2), "nested": [{"position": position}] if nested else position}
    with checkpointer(first) as one:
        one.resume()
        one.wait()
        with pytest.raises(LimpetError, match=f"The {type(position).__name__} in the state counts"):
            checkpointer((lambda: second) if is_function else second).resume()
        if make is limpet.Progress:
            one.step()
            with pytest.raises(LimpetError, match=r"ckpt\.step"):  # the refusal has changed nothing
                position.step = 7
        assert one.current_step == (make is limpet.Progress)
    with checkpointer(second) as two:  # the first one is closed
        two.resume()


def test_only_open_checkpointers_of_other_runs_count():
    state, store = {"w": torch.ones(1), "progress": limpet.Progress()}, MemoryStore()
    checkpointer(state).resume()  # discarded
    gc.collect()
    first = checkpointer(state, store)
    first.resume()
    first.step()
    with pytest.warns(UnsavedSteps):
        second = checkpointer(state, store)  # of one run: it closes the first one
    with pytest.raises(LimpetError, match="closed"):
        first.step()
    own = {"w": state["w"], "progress": limpet.Progress()}
    with checkpointer(own) as other:  # only the position must not be shared
        other.step()
    second.close()
