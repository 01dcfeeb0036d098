"""Python imports this at its start, in the processes that the tests start (see ``conftest.py``).

It makes three things faster, which cost 1.6 s of the 2.1 s of processor time that a process spends
until it has an optimizer:

- A search for garbage among the objects of PyTorch finds none, so there is none during its import,
  nor at the end of the process.
- The first optimizer imports ``torch._dynamo`` and 800 other modules, in order to exclude functions
  from ``torch.compile``. That is needed only if something else imports ``torch._dynamo``.
- PyTorch imports ``torch.export``, and kernels in Python for the device "meta". ``torch._dynamo``
  and DTensor need them in order to compute shapes. Without them, a call for this device can only
  raise.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Finder:
    """Finds one module, and lets ``execute`` run it: a function of the module and its loader."""

    def __init__(self, name: str, execute: Callable[[ModuleType, Callable[..., None]], None]):
        self.name, self.execute = name, execute

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute, module_executes = self.execute, spec.loader.exec_module
            spec.loader.exec_module = lambda module: execute(module, module_executes)
        return spec


def execute_without_gc(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()


def execute_lazily(module: Any, execute: Callable[[ModuleType], None]) -> None:
    """Execute the module when something asks for a name of it. In a process of pytest, do so now:
    there, tests use the device "meta"."""

    def execute_and_get(name: str) -> Any:
        if name.startswith("__"):  # the import system asks for them
            raise AttributeError(name)
        del module.__getattr__
        execute(module)
        return getattr(module, name)

    if "pytest" in sys.modules:
        execute(module)
    else:
        module.__getattr__ = execute_and_get


def execute_kernels_lazily(module: Any, execute: Callable[[ModuleType], None]) -> None:
    execute_lazily(module, execute)
    if hasattr(module, "__getattr__"):
        import torch
        from torch._opaque_base import OpaqueBaseMeta

        # the kernels set it, and without it there is no torch.Generator
        torch._C._set_generator_metaclass(OpaqueBaseMeta)


def execute_with_kernels(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    from torch import _meta_registrations

    _meta_registrations.aten  # noqa: B018 - this executes it
    execute(module)


def disable_lazily(module: Any, execute: Callable[[ModuleType], None]) -> None:
    execute(module)
    disable = module._disable_dynamo

    def disable_if_imported(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return partial(disable_if_imported, recursive=recursive)
        disabled = disable(function, recursive)

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            chosen = disabled if "torch._dynamo" in sys.modules else function
            return chosen(*arguments, **options)

        return call

    module._disable_dynamo = disable_if_imported


def use_grad_without_dynamo(module: Any, execute: Callable[[ModuleType], None]) -> None:
    execute(module)
    with_dynamo = module._use_grad_for_differentiable
    set_grad_enabled = module.torch.set_grad_enabled

    def use_grad_for_differentiable(function: Any) -> Any:
        breaking = with_dynamo(function)

        @wraps(function)
        def call(optimizer: Any, *arguments: Any, **options: Any) -> Any:
            if "torch._dynamo" in sys.modules:
                return breaking(optimizer, *arguments, **options)
            with set_grad_enabled(optimizer.defaults["differentiable"]):
                return function(optimizer, *arguments, **options)

        return call

    module._use_grad_for_differentiable = use_grad_for_differentiable


FINDERS = {
    "torch": execute_without_gc,
    "torch._compile": disable_lazily,
    "torch._dynamo": execute_with_kernels,
    "torch._meta_registrations": execute_kernels_lazily,
    "torch.distributed.tensor": execute_with_kernels,
    "torch.export": execute_lazily,
    "torch.optim.optimizer": use_grad_without_dynamo,
}
finders: list[Any] = [Finder(name, execute) for name, execute in FINDERS.items()]
sys.meta_path[:0] = finders
