"""Find a prefix that only one of two models has in its names, because it wraps the other one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from limpet.format.names import join_key
from limpet.layout.select import is_slot_key

_MAX_RENAMES = 4


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model of which one side has all names with a prefix.

    ``root``: its key; ``prefix``: with a dot at its end; ``is_live``: whether the live side has it;
    ``names``: those without the prefix that both sides have; ``lacking``, ``surplus``: the keys of
    the live state and of the snapshot that still have no counterpart, without optimizer slots.
    """

    root: str
    prefix: str
    is_live: bool
    names: Sequence[str]
    lacking: Sequence[str]
    surplus: Sequence[str]

    @classmethod
    def find(cls, lacking: Sequence[str], surplus: Sequence[str]) -> Self | None:
        """Find the prefix from the keys that the snapshot lacks and those that the live state
        lacks. Return None if there is none, or several, or if a name of the inner model would have
        no counterpart."""
        live, saved = ([key for key in keys if not is_slot_key(key)] for keys in (lacking, surplus))
        live_names, saved_names = _names_by_root(live), _names_by_root(saved)
        found = []
        for root in live_names.keys() & saved_names.keys():
            sides = live_names[root], saved_names[root]
            for is_live, (wrapper, inner) in ((True, sides), (False, sides[::-1])):
                if prefix := _find_prefix(wrapper, inner):
                    outer = {join_key(root, prefix + name) for name in inner}
                    inside = {join_key(root, name) for name in inner}
                    gone = outer if is_live else inside, inside if is_live else outer
                    left = [[k for k in keys if k not in g] for keys, g in zip((live, saved), gone)]
                    found.append(cls(root, prefix, is_live, inner, *left))
        return found[0] if len(found) == 1 else None

    def renames(self) -> dict[str, str]:
        """Return the renames of the snapshot's keys, one for each part of the inner model. Return
        an empty dict if there are many."""
        parts = dict.fromkeys(name.partition(".")[0] for name in self.names)
        pairs = [(join_key(self.root, p), join_key(self.root, self.prefix + p)) for p in parts]
        pairs = pairs if self.is_live else [(new, old) for old, new in pairs]
        return dict(pairs) if len(pairs) <= _MAX_RENAMES else {}


def _names_by_root(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the last levels of keys by the levels above."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        root, _, name = key.rpartition("/")
        names[root].append(name)
    return names


def _find_prefix(wrapper: Sequence[str], inner: Sequence[str]) -> str:
    """Return the only prefix that gives every name of ``inner`` one of ``wrapper``, or an empty
    string."""
    outer, first = set(wrapper), inner[0]
    prefixes = {name[: -len(first)] for name in wrapper if name.endswith(f".{first}")}
    fitting = [p for p in prefixes if all(p + name in outer for name in inner)]
    return fitting[0] if len(fitting) == 1 else ""
