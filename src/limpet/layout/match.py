"""Match keys of a snapshot with keys of a live state that have other names, for advice.

Only names are compared: a wrapper that one side has in front of all names of a model, and names
that ``difflib`` finds close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import Self

from limpet.format.names import join_key
from limpet.layout.select import is_renamed, is_slot_key
from limpet.text import to_printable

_MAX_RENAMES = 16
"""With more parts of other names, or members, no close names are searched for, and not all renames
of a wrapper are shown."""


@dataclass(frozen=True, slots=True)
class Match:
    """How keys of a snapshot match keys of a live state that have other names.

    ``rename``: the renames, as an expression in Python, or an empty string; ``lacking``,
    ``surplus``: the missing and the unexpected keys that still have no counterpart; ``unloaded``:
    the keys of the modules of which the snapshot would then load nothing, although it has values
    below these keys.
    """

    rename: str = ""
    lacking: Sequence[str] = ()
    surplus: Sequence[str] = ()
    unloaded: Sequence[str] = ()

    @classmethod
    def find(
        cls,
        lacking: Sequence[str],
        surplus: Sequence[str],
        saved: Sequence[str],
        *,
        modules: Sequence[str] = (),
        objects: Sequence[str] = (),
    ) -> Self:
        """Match the keys that the snapshot lacks with those that the live state lacks.

        ``saved``: all keys of the snapshot; ``modules``: the keys of the live modules; ``objects``:
        the keys of optimizers and other objects that the snapshot lacks as a whole.
        """
        common = _levels({*saved}.difference(surplus))
        live, old = ([k for k in keys if not is_slot_key(k)] for keys in (lacking, surplus))
        renames = _unwrap(live, old) or _match_parts(live, old)
        members = sorted(k for k in _levels(surplus) - common if not is_renamed(k, renames))
        renames |= _match_names(objects, members)
        if renames:
            lacking = [key for key in lacking if not is_renamed(key, renames.values())]
            surplus = [key for key in surplus if not is_renamed(key, renames)]
        unmatched = _levels(lacking) & _levels(surplus) - common
        unloaded = tuple(key for key in modules if key in unmatched)
        return cls(_format(renames), tuple(lacking), tuple(surplus), unloaded)


def _unwrap(live: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """Return the renames for a model of which one side has all names with a prefix, because it
    wraps the model; an empty dict if there is no such model, or several."""
    live_names, saved_names = _names_by_root(live), _names_by_root(saved)
    found = []
    for root in live_names.keys() & saved_names.keys():
        sides = live_names[root], saved_names[root]
        for is_live, (wrapper, inner) in ((True, sides), (False, sides[::-1])):
            if prefix := _find_prefix(wrapper, inner):
                parts = dict.fromkeys(name.partition(".")[0] for name in inner)
                pairs = [(join_key(root, p), join_key(root, prefix + p)) for p in parts]
                found.append(dict(pairs if is_live else [(outer, p) for p, outer in pairs]))
    return found[0] if len(found) == 1 else {}


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


def _match_parts(live: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """Return the renames of parts with equal names below them, such as ``weight`` and ``bias``, if
    both sides have as many such parts."""
    new, old = _parts(live), _parts(saved)
    renames: dict[str, str] = {}
    if max(len(new), len(old)) > _MAX_RENAMES:
        return renames
    for members in {*map(frozenset, new.values())}:
        names, fitting = ([p for p in s if s[p] == members] for s in (new, old))
        if len(names) == len(fitting) == 1:
            renames[fitting[0]] = names[0]
        elif len(names) == len(fitting):
            renames |= _match_names(names, fitting)
    return renames


def _parts(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the last names of keys by what is in front of them: ``model/fc`` has ``weight``."""
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for key in keys:
        above, separator, name = key.rpartition("." if "." in key.rpartition("/")[2] else "/")
        if separator and above:
            parts[above].add(name)
    return parts


def _match_names(new: Sequence[str], old: Sequence[str]) -> dict[str, str]:
    """Return the renames of old names to the new ones that are close to them, at the same depth."""
    renames: dict[str, str] = {}
    if max(len(new), len(old)) > _MAX_RENAMES:
        return renames
    for name in new:
        same = [o for o in old if o.count("/") == name.count("/") and o not in renames]
        renames |= dict.fromkeys(get_close_matches(name, same, n=1, cutoff=0.5), name)
    return renames


def _levels(keys: Iterable[str]) -> set[str]:
    return {level for key in keys for level in accumulate(key.split("/"), join_key)}


def _format(renames: Mapping[str, str]) -> str:
    """Return renames as an expression in Python, or an empty string."""
    pairs = [f'"{old}": "{new}"' for old, new in renames.items()]
    more = [", ..."] if len(pairs) > _MAX_RENAMES else []
    text = ", ".join(pairs[:_MAX_RENAMES]) + "".join(more)
    return to_printable(f"{{{text}}}") if pairs else ""
