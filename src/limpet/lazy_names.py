"""The names of a public package, each imported on first use, and then with short tracebacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from limpet.tracebacks import short_tracebacks


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__``, and ``__dir__`` of a package. ``names``: those of each
    module; under ``""``, modules. ``a=b`` is ``a`` in its module, and ``b`` in the package."""
    places = {
        listed.rpartition("=")[2]: (module, listed.partition("=")[0])
        for module, text in names.items()
        for listed in text.split()
    }

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = places[name]
        found = import_module(f"limpet.{module or name}")
        value = found
        if module:
            value = short_tracebacks(getattr(found, attribute))
            setattr(found, attribute, value)  # else pickle refuses a function
        setattr(sys.modules[package], name, value)
        return value

    return sorted(places), get, lambda: sorted(places)
