"""Python imports this at its start, in the processes that the tests start (see ``conftest.py``).

It makes two things faster, which cost 1.2 s of the 1.7 s of processor time that a process spends
until it has an optimizer:

- A search for garbage among the objects of PyTorch finds none, so there is none during its import,
  nor at the end of the process.
- The first optimizer imports ``torch._dynamo`` and 800 other modules, in order to exclude functions
  from ``torch.compile``. That is needed only if something else imports ``torch._dynamo``.
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
    "torch.optim.optimizer": use_grad_without_dynamo,
}
finders: list[Any] = [Finder(name, execute) for name, execute in FINDERS.items()]
sys.meta_path[:0] = finders
