"""Saves and restores the global random generators."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.random  # NumPy loads it on first use: an RNG always includes its generator

from limpet.errors import PlanError
from limpet.generators import States, capture_states, restore_states
from limpet.lazy_torch import torch_or_none


class RNG:
    """The state of the global random generators.

    They are the generators of Python and NumPy, of PyTorch if the program has imported it, and of
    each device of the accelerator that PyTorch uses.

    A ``limpet.DataLoader`` needs none: it is for custom loops that draw random numbers in one
    sequence. Put it last into the state: a load of another object may draw. After a resume, the
    random numbers then continue as if the training had not been interrupted, and
    ``Checkpointer.epochs`` and ``steps`` seed nothing. NumPy has one global generator, the legacy
    one. An ``RNG`` does not include ``numpy.random.Generator`` objects.

    Each rank saves its own generators. A rank that did not exist when the snapshot was saved gets
    seeds that are derived from the state of rank 0 and its own rank.
    """

    keeps_per_rank = True

    def __repr__(self) -> str:
        return "RNG()"

    def state_dict(self) -> dict[str, Any]:
        """Return the current states of the generators by name.

        The states of the devices are a list under their type, such as ``cuda``, once the program
        has used the accelerator: until then, its generators have only their seed.
        """
        states = capture_states()
        version, words, gauss = states["python"]
        python = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
        state: dict[str, Any] = {"python": python, "numpy": _to_legacy(states["numpy"])}
        if "torch" in states:
            state["torch"] = states["torch"]
        for name in states:
            kind, _, index = name.partition(":")
            if index:
                state.setdefault(kind, []).append(states[name])
        return state

    def check_state_dict(self, state: object) -> None:
        """Raise ``PlanError`` if this is not the state of an ``RNG``. The generators of PyTorch and
        of devices are optional."""
        if not isinstance(state, dict) or not {"python", "numpy"} <= set(state):
            raise PlanError(
                "The loaded value is not the state of an RNG",
                expected="python, numpy, and torch",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; devices that it lacks keep their generators. Raises ``PlanError`` if it is
        not the state of an ``RNG``."""
        self.check_state_dict(state)
        python = state["python"]
        if isinstance(python, dict):  # from before Limpet supported ranks: the tuple
            python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        states: States = {"python": python, "numpy": state["numpy"]}
        if "torch" in state:
            states["torch"] = state["torch"]
        for kind in state.keys() - {"python", "numpy", "torch"}:
            states |= {f"{kind}:{i}": saved for i, saved in enumerate(state[kind])}
        restore_states(states)

    def derive(self, rank: int) -> None:
        """Seed all generators from the current state and the rank."""
        seed_bytes = sha256(repr((capture_states()["python"], rank)).encode()).digest()
        seed = int.from_bytes(seed_bytes[:8], "little") >> 1
        states: States = {"python": random.Random(seed).getstate()}
        states["numpy"] = np.random.RandomState(seed % (1 << 32)).get_state(legacy=False)
        torch = torch_or_none()
        if torch is not None:
            torch.manual_seed(seed)  # seeds the devices too
            states["torch"] = torch.Generator().manual_seed(seed).get_state()
            states = capture_states() | states
        restore_states(states)


def _to_legacy(state: dict[str, Any]) -> Any:
    """Return the state of NumPy's generator as the tuple that snapshots contain, if it has one."""
    if state["bit_generator"] != "MT19937":  # np.random.set_bit_generator was called
        return state
    inner = state["state"]
    return "MT19937", inner["key"], inner["pos"], state["has_gauss"], state["gauss"]
