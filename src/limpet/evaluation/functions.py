"""Functions of the user by name, so that worker processes can import them."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from limpet.arguments import require
from limpet.errors import LimpetError
from limpet.text import to_repr

_MAIN = "__evaluation_main__"
"""The name under which a worker runs the script of the evaluator. ``__mp_main__`` is taken: it is
``__main__`` as soon as something imports ``multiprocessing``, as torch does."""


@dataclass(frozen=True, slots=True)
class FunctionName:
    """Where a function is: a module, or the path of the script that was started, and its name."""

    module: str
    name: str
    script: str | None = None

    @classmethod
    def of(cls, function: Callable[..., Any] | str, what: str) -> FunctionName:
        """Return the name of a function, or of one given as ``package.module:function``. Raises
        ``LimpetError`` if no other process could import it."""
        if isinstance(function, str):
            module, colon, name = function.partition(":")
            is_name = bool(module and colon and name)
            require(f"{what}=", is_name, "a function, or package.module:function", function)
            return cls(module, name)
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        if module == _MAIN:
            raise LimpetError(f"the script starts an evaluation with the function {what}")
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        is_reachable = bool(name) and "<" not in name and (module != "__main__" or script)
        is_bound = inspect.ismethod(function) and not inspect.isclass(function.__self__)
        if not is_reachable or is_bound or not callable(function):
            raise LimpetError(
                f"Another process cannot import the function {what}, {to_repr(function)[:200]}:"
                " move it to the top level of a module or script, or use workers=0"
            )
        return cls(module, name, script if module == "__main__" else None)

    def resolve(self) -> Callable[..., Any]:
        """Import the function. Raises ``LimpetError`` with the cause if that fails."""
        try:
            value = self._import_module()
            for part in self.name.split("."):
                value = getattr(value, part)
        except (Exception, SystemExit) as e:  # the module is the user's
            raise LimpetError(
                f"{self} cannot be imported",
                expected="a module on the path of Python with this function",
                found=e.what if isinstance(e, LimpetError) else f"{type(e).__name__}: {e}",
                todo="Each worker imports the script: put all but imports and definitions under"
                ' `if __name__ == "__main__":`'
                if self.script is not None
                else "Write package.module:function, as in an import statement. Start the command"
                " in the folder of the module, or set PYTHONPATH",
            ) from e
        if not callable(value):
            raise LimpetError(f"{self} is not a function", found=to_repr(value)[:200])
        return value  # type: ignore[no-any-return]

    def _import_module(self) -> Any:
        if self.script is None:
            return importlib.import_module(self.module)
        if _MAIN not in sys.modules:
            module = ModuleType(_MAIN)
            sys.modules[_MAIN] = module
            try:
                module.__dict__.update(runpy.run_path(self.script, run_name=_MAIN))
            except BaseException:
                del sys.modules[_MAIN]
                raise
        return sys.modules[_MAIN]

    def __str__(self) -> str:
        return f"{self.script or self.module}:{self.name}"
