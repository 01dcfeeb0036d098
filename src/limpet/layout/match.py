"""Match keys of a snapshot with keys of a live state that have other names, for advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Self

from limpet.format.names import join_key
from limpet.layout.select import (
    KeyFilter,
    is_renamed,
    suggest_member_renames,
    suggest_renames,
)
from limpet.layout.wrapped import Wrapped
from limpet.text import to_printable


@dataclass(frozen=True, slots=True)
class Match:
    """How keys of a snapshot match keys of a live state that have other names.

    ``rename``: the renames, as an expression in Python, or an empty string; ``inner``: the live
    state of a model without its wrapper, in the same form, and ``root``: the key of this model;
    ``lacking``, ``surplus``: the missing and the unexpected keys that still have no counterpart;
    ``unloaded``: the keys of the modules of which the snapshot would then load nothing, although it
    has values below these keys.
    """

    rename: str = ""
    inner: str = ""
    root: str = ""
    lacking: Sequence[str] = ()
    surplus: Sequence[str] = ()
    unloaded: Sequence[str] = ()

    @classmethod
    def find(
        cls,
        lacking: Sequence[str],
        surplus: Sequence[str],
        saved: Sequence[str],
        url: str,
        *,
        modules: Sequence[str] = (),
        absent: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Match the keys that the snapshot lacks with those that the live state lacks.

        ``saved``: all keys of the snapshot; ``url``: its address; ``modules``: the keys of the live
        modules; ``absent``: as for ``suggest_member_renames``.
        """
        common = {*saved}.difference(surplus)
        renames: dict[str, str] = {}
        rename, inner, root = "", "", ""
        wrapped = Wrapped.find(lacking, surplus)
        if wrapped is not None:
            rename, inner = _unwrap(wrapped, url, modules)
            if rename or inner:
                renames, root = wrapped.renames(), wrapped.root
                lacking, surplus = wrapped.lacking, wrapped.surplus
        if renames or not rename:
            others = suggest_renames(lacking, surplus)
            others |= suggest_member_renames(absent or {}, surplus, common)
            if others:
                lacking = [key for key in lacking if not is_renamed(key, others.values())]
                surplus = [key for key in surplus if not is_renamed(key, others)]
                rename = _quote_renames(renames | others)
        unmatched = _levels(lacking) & _levels(surplus) - _levels({*saved}.difference(surplus))
        unloaded = tuple(key for key in modules if key in unmatched)
        rename, inner = to_printable(rename), to_printable(inner)
        return cls(rename, inner, root, tuple(lacking), tuple(surplus), unloaded)

    def arguments(self, saved: Sequence[str]) -> str:
        """Return the arguments of a load that apply the match, or an empty string."""
        suggestions = [f"rename={self.rename}"] if self.rename else []
        if self.inner:
            is_whole = all(key.startswith(f"{self.root}/") for key in saved)
            keys = "" if is_whole else f' with keys="{self.root}"'
            suggestions.insert(0, f"into={self.inner}{keys}")
        return " or ".join(suggestions)


def suggest_submodule(requested: Sequence[str], selected: KeyFilter, modules: Sequence[str]) -> str:
    """Return the argument that loads a part of a module into a live module that is this part, or an
    empty string. ``requested``: the keys of the snapshot to load, of which ``selected`` has the
    name of the part."""
    roots = {key.rpartition("/")[0] for key in requested}
    root = roots.pop() if len(roots) == 1 else ""
    if root not in modules:
        return ""
    paths = [key[len(root) + 1 :].split(".")[:-1] for key in requested]
    common = [p[0] for p in takewhile(lambda p: len({*p}) == 1, zip(*paths))]
    parts = (common[: i + 1] for i in range(len(common)))
    levels = next((p for p in parts if selected(f"{root}/{'.'.join(p)}")), None)
    if levels is None:
        return ""
    module = root.rpartition("/")[2] if root.rpartition("/")[2].isidentifier() else "module"
    value = module
    for level in reversed(levels):
        value = f'torch.nn.ModuleDict({{"{level}": {value}}})'
    part = f"{root}/{'.'.join(levels)}"
    return f"into={_nest(root, value)}, if {module} is the module {part} of the snapshot"


def _unwrap(wrapped: Wrapped, url: str, modules: Sequence[str]) -> tuple[str, str]:
    """Return the renames, and the live state, that load a model although one side has it in a
    wrapper."""
    renames = wrapped.renames()
    rename = _quote_renames(renames) if renames else ""
    root, prefix = wrapped.root, wrapped.prefix
    inner, outer = join_key(root, ""), join_key(root, prefix)
    old, new = (inner, outer) if wrapped.is_live else (outer, inner)
    if old and not renames:
        rename = (
            f"{{k: k.replace({old!r}, {new!r}, 1) for k in limpet.open({url!r})"
            f" if k.startswith({old!r})}}"
        )
    name = root.rpartition("/")[2]
    if not (wrapped.is_live and root in modules and name.isidentifier()):
        return rename, ""
    levels = "".join(f"[{p}]" if p.isdecimal() else f".{p}" for p in prefix[:-1].split("."))
    return rename, _nest(root, f"{name}{levels}")


def _levels(keys: Iterable[str]) -> set[str]:
    return {level for key in keys for level in accumulate(key.split("/"), join_key)}


def _nest(key: str, value: str) -> str:
    """Return a live state that has a value under a key, as an expression in Python."""
    for level in reversed(key.split("/")):
        value = f'{{"{level}": {value}}}'
    return value


def _quote_renames(renames: Mapping[str, str]) -> str:
    pairs = ", ".join(f'"{old}": "{new}"' for old, new in renames.items())
    return f"{{{pairs}}}"
