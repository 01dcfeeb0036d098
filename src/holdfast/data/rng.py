"""Saves and restores the global random generators."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

import numpy as np

from holdfast.errors import PlanError
from holdfast.lazy_torch import torch_or_none


class RNG:
    """The state of the global random generators.

    They are the generators of Python and NumPy, of PyTorch if the program has imported it, and of
    each device of the accelerator that PyTorch uses.

    Put an ``RNG`` into the state. After a resume, the random numbers then continue as if the
    training had not been interrupted. NumPy has one global generator, the legacy one. An ``RNG``
    does not include ``numpy.random.Generator`` objects.

    Each rank saves its own generators. A rank that did not exist when the snapshot was saved gets
    seeds that are derived from the state of rank 0 and its own rank.
    """

    keeps_per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators by name.

        The states of the devices are a list under the name of the device type, such as ``cuda``,
        with one state per device. They are included only if the program uses the accelerator.
        """
        version, words, gauss = random.getstate()
        python = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
        state: dict[str, Any] = {"python": python, "numpy": np.random.get_state()}
        torch = torch_or_none()
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            kind, device = _accelerator(torch)
            # ask is_initialized first: is_available may break a later fork
            in_use = getattr(device, "is_initialized", lambda: True)()
            if in_use and torch.accelerator.is_available():
                state[kind] = [device.get_rng_state(*args) for args in _device_arguments(torch)]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Devices that it does not contain keep their current generators.

        Raises ``PlanError`` if it is not the state of an ``RNG``.
        """
        if not isinstance(state, dict) or not {"python", "numpy"} <= set(state):
            raise PlanError(
                "The loaded value is not the state of an RNG",
                expected="python, numpy, and torch",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )
        python = state["python"]
        if isinstance(python, dict):  # from before Holdfast supported ranks: the tuple
            python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        random.setstate(python)
        np.random.set_state(state["numpy"])
        if "torch" in state:
            import torch  # the program may import it only after the resume

            torch.set_rng_state(state["torch"])
            kind, device = _accelerator(torch)
            if kind in state and torch.accelerator.is_available():
                for saved, args in zip(state[kind], _device_arguments(torch), strict=False):
                    device.set_rng_state(saved, *args)

    def derive(self, rank: int) -> None:
        """Seed all generators from the current state and the rank."""
        seed_bytes = sha256(repr((random.getstate(), rank)).encode()).digest()
        seed = int.from_bytes(seed_bytes[:8], "little") >> 1
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch = torch_or_none()
        if torch is not None:
            torch.manual_seed(seed)


def _accelerator(torch: Any) -> tuple[str, Any]:
    """Return the type and module of PyTorch's accelerator, or ``("cpu", None)`` without one."""
    device = torch.accelerator.current_accelerator()
    return ("cpu", None) if device is None else (device.type, torch.get_device_module(device))


def _device_arguments(torch: Any) -> list[tuple[int, ...]]:
    """Return the arguments that select each device; a single device needs none (MPS takes none)."""
    count = torch.accelerator.device_count()
    return [()] if count == 1 else [(i,) for i in range(count)]
