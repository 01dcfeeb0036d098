"""Load an object by its own ``load_state_dict``, after a comparison of the keys of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from limpet.format import tree
from limpet.format.names import escape_level, join_key
from limpet.layout.select import ABSENT
from limpet.loading.binding import STATE_INVALID, Binding
from limpet.loading.targets import Finalize
from limpet.state.modules import UNCHANGED, calling

Adapt = Callable[[Any], Any]
"""Makes a loaded state fit a live object, where the caller tolerates the differences."""

_INNER_SCHEDULERS = "_schedulers"
"""The key of the states within the state of a ``SequentialLR`` or a ``ChainedScheduler``."""

_VERSION_DEPENDENT = frozenset({"verbose", "default_min_lr"})
"""Keys of schedulers that only some releases of PyTorch have."""


def bind_stateful(
    binding: Binding, value: Any, node: Any, key: str, convert: Adapt | None = None
) -> Finalize:
    """Bind an object by ``load_state_dict``, called after the bytes are read. Its keys are compared
    with the live ones, or ``check_state_dict`` is called: now if they are plain, before changes.
    ``convert``: what ``load_state_dict`` gets from the loaded state."""
    if node is ABSENT:
        binding.note_missing(key)
        return lambda: value
    if not binding.is_any_selected(node, key):
        return lambda: value
    finalize_state = binding.targets.add_fresh(node, key, "cpu")
    check = getattr(value, "check_state_dict", None)
    adapt = _compare_with_live(binding, value, node, key) if check is None else _unchanged
    if check is not None and not any(tree.is_leaf(n) for _, n in tree.walk(node, key)):
        effect = f"Nothing was {'saved' if binding.targets.is_dry else 'loaded'}. {UNCHANGED}"
        with calling(value, key, "check_state_dict", effect):
            try:
                check(finalize_state())
            except Exception:
                if not binding.targets.is_dry:
                    raise
                check(value.state_dict())  # another thread may have changed the object meanwhile

    def finalize() -> Any:
        state = adapt(finalize_state())
        state = state if convert is None else convert(state)
        with calling(value, key, "load_state_dict", STATE_INVALID, live_state="not valid"):
            value.load_state_dict(state)
        return value

    return finalize


def _compare_with_live(binding: Binding, value: Any, node: Any, key: str) -> Adapt:
    """Record the differences between a saved state and the live ``state_dict()``, which is called
    once, and not at all if no saved key is compared, or if that changes the object."""
    saved_names = [name for name, _, _ in tree.children(node, key)] if tree.is_dict(node) else []
    has_no_field = saved_names and not any(map(_is_field, saved_names))
    # torchdata's loaders would begin an iterator, which the next iter() returns whatever is loaded
    if has_no_field or is_from_torchdata(value):
        return _unchanged
    try:
        live = binding.live_state(value, key)
    except Exception:  # noqa: BLE001  (a save raises it: an object may have no state before a load)
        return _unchanged
    differing = len(binding.differences.missing) + len(binding.differences.unexpected)
    adapt = _compare(binding, live, node, key)
    if len(binding.differences.missing) + len(binding.differences.unexpected) > differing:
        binding.differences.objects.append(key)
    return adapt


def is_from_torchdata(value: Any) -> bool:
    """Return True if the class of an object, or one of its bases, is torchdata's."""
    return any(kind.__module__.startswith("torchdata.") for kind in type(value).__mro__)


def _compare(binding: Binding, live: Any, node: Any, key: str) -> Adapt:
    """Compare the keys of two states. A live state that is empty accepts every saved state."""
    if live is None or (isinstance(live, dict) and (not live or type(live) is Counter)):
        return _unchanged
    if isinstance(live, dict) != tree.is_dict(node):
        binding.note_other_kind(f"state of {type(live).__name__}", node, key)
        return _unchanged
    if not tree.is_dict(node):
        return _unchanged
    saved = {name: (child, k) for name, child, k in tree.children(node, key)}
    lacking = [n for n in live if n not in saved and _is_field(n)]
    # an object that is given its own fields also expects its internal ones
    kept = {n: v for n, v in live.items() if n not in saved and not _is_item(n)} if lacking else {}
    surplus = [n for n in saved if n not in live and _is_field(n)]
    for name in lacking:
        binding.note_missing(join_key(key, escape_level(name)))
    binding.note_unexpected(saved[name] for name in surplus)
    adapt_inner: Adapt = _unchanged
    if _INNER_SCHEDULERS in live and _INNER_SCHEDULERS in saved:
        adapt_inner = _compare_lists(binding, live[_INNER_SCHEDULERS], *saved[_INNER_SCHEDULERS])

    def adapt(state: Any) -> Any:
        for name in surplus:
            del state[name]
        state.update(kept)
        if _INNER_SCHEDULERS in state:
            state[_INNER_SCHEDULERS] = adapt_inner(state[_INNER_SCHEDULERS])
        return state

    return adapt


def _compare_lists(binding: Binding, live: Any, node: Any, key: str) -> Adapt:
    if type(live) is not list or tree.tag_of(node) != "list":
        return _unchanged
    keys = [f"{key}/{i}" for i in range(max(len(live), len(node["list"])))]
    adapts = [_compare(binding, *pair) for pair in zip(live, node["list"], keys)]
    for k in keys[len(node["list"]) :]:
        binding.note_missing(k)
    binding.note_unexpected(zip(node["list"][len(live) :], keys[len(live) :], strict=True))

    def adapt(states: Any) -> Any:
        return [adapt_one(s) for adapt_one, s in zip(adapts, states)] + live[len(states) :]

    return adapt


def _is_field(name: Any) -> bool:
    """Return True for a key that every state of one class has. One that begins with an underscore
    is internal: objects, and releases of a library, add and remove such attributes."""
    is_internal = _is_item(name) or name in _VERSION_DEPENDENT or name.startswith("_")
    return not is_internal or name == _INNER_SCHEDULERS


def _is_item(name: Any) -> bool:
    """Return True for a key of which an object may have many: no string, or a digit at its end."""
    return type(name) is not str or name[-1:].isdecimal()


def _unchanged(state: Any) -> Any:
    return state
