"""Load a module: fill its parameters and buffers in place, and pass everything else to its
``load_state_dict``.

Loading code that is not PyTorch's own may convert what it gets: names, shapes, and values of an
earlier version. It gets memory that no live tensor shares.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import torch

from limpet.errors import InexactResume
from limpet.format import tree
from limpet.format.names import escape_level, join_key
from limpet.layout.select import ABSENT
from limpet.loading.binding import STATE_INVALID, Binding, Members
from limpet.loading.targets import Finalize, LoadTargets
from limpet.state import composites, modules, sharding
from limpet.state.arrays import part_library
from limpet.text import format_list, warn_user, with_article

_MAX_NAMES = 5


def bind_module(binding: Binding, module: Any, node: Any, key: str) -> Finalize:
    """Bind every member of the module's state dict. The module's code loads what is not the memory
    of a parameter or buffer (extra state, lazy parameters); custom code loads every member."""
    members = binding.dict_members(module, node, key)
    if members is None:
        return lambda: module
    with modules.calling(module, key, "state_dict", f"Nothing was loaded. {modules.UNCHANGED}"):
        state = binding.live_state(module, key)
    names = dict(zip(modules.strip_wrapper_names(module, list(state), key), state, strict=True))
    loader = _Loader(binding, module, key, state, names)
    if node is not ABSENT and "metadata" in node:
        loader.versions = tree.decode(node["metadata"], key, tree.reject_leaf)
    own_paths = loader.own_paths
    converted = loader.try_own_code(members) if own_paths else {}
    live = dict(module.named_parameters(remove_duplicate=False))
    live.update(module.named_buffers(remove_duplicate=False))
    in_place = {
        _memory_key(t, join_key(key, escape_level(name)))
        for name, t in live.items()
        if _is_dense(t)
    }
    fresh, tried = loader.fresh, loader.tried
    absent = {}  # live members by key that are not saved
    for plain_name, name in {**names, **converted}.items():
        value: Any = state.get(name)
        child, k = members.pop(plain_name, (ABSENT, join_key(key, escape_level(plain_name))))
        if child is ABSENT or not binding.selected(k):
            is_absent = name in loader.missing if name in tried else child is ABSENT
            if is_absent:
                absent[k] = value if name in live and _is_dense(value) else None
            elif name not in tried and _is_dense(value):
                binding.note_unselected(value, child, k)
            if name in tried:
                loader.dropped.add(name)
            else:
                loader.kept.append(plain_name)
            continue
        if name not in loader.ignored:
            loader.bound.append(plain_name)
        if name in tried:
            loader.bind_converted(name, child, k)
        elif name in live and composites.is_subclass(live[name]):
            # the member itself: its alias in the state dict may have copies of inner tensors
            binding.bind_subclass(live[name], child, k)
        elif not _is_dense(value) or name.rpartition(".")[2] == modules.EXTRA_STATE:
            fresh[name] = binding.targets.add_fresh(child, k)
        elif (source := binding.array_source(value, child, k)) is None:
            continue
        elif own_paths and _owner(plain_name, own_paths) is not None:
            binding.claim(value, source, k)
            like = value if binding.targets.is_dry else torch.empty_like(value)
            fresh[name] = binding.add_array(like, source, k)
            loader.checked[plain_name] = k
        elif value.numel() == 0 or _memory_key(value, k) in in_place:
            binding.add_array(value, source, k)
        else:
            fresh[name] = binding.targets.add_fresh(child, k)
    for k, value in absent.items():
        if not binding.is_filled(value):  # of tied parameters, some libraries save only one name
            binding.note_missing(k)
    binding.note_unexpected(members.values())
    return loader.load


@dataclass
class _Loader:
    """What a module's code loads. ``names``: live names by those without wrappers; ``fresh``: what
    it gets by live name, beside the live values of others than those ``dropped``."""

    binding: Binding
    module: Any
    key: str
    state: dict[str, Any]
    names: dict[str, str]
    versions: Any = None  # of the code that saved
    fresh: dict[str, Finalize] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    bound: list[str] = field(default_factory=list)  # without wrappers, as the others below
    kept: list[str] = field(default_factory=list)
    checked: dict[str, str] = field(default_factory=dict)  # keys of what it should not change
    # by live name, of the submodules whose code was tried: the devices of all members, and those
    # that it does not get, does not use, or does not load because of their shapes
    tried: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)

    def load(self) -> Any:
        """Load the module by its code, unless all members were filled in place. Warn of members
        that the code has changed although it is of their version."""
        module, key = self.module, self.key
        is_kept = self.kept and not self.bound
        if not self.fresh and (is_kept or not self.own_paths):
            return module
        loaded = {name: finalize() for name, finalize in self.fresh.items()}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            value: Any = loaded.get(name)
            is_sparse = str(buffer.layout).startswith(("torch.sparse_cs", "torch.sparse_bs"))
            is_same = is_sparse and getattr(value, "layout", None) == buffer.layout
            if is_same and value.shape == buffer.shape:
                buffer.resize_as_sparse_(value)  # or PyTorch does not copy another number
        given: Any = OrderedDict({**self.state, **loaded})
        given._metadata, converted = self._choose_versions(self.bound)
        # a live value must not be converted
        unconverted = {self.names[n] for n in self.kept if not converted.isdisjoint(_paths_of(n))}
        for name in unconverted | self.dropped:
            given.pop(name, None)
        with modules.calling(module, key, "load_state_dict", STATE_INVALID, live_state="not valid"):
            found = modules.strip_wrapper_paths(module, [*chain(*_load_state_dict(module, given))])
            tolerated = {*self.missing, *self.unexpected, *self.ignored}
            others = {*found}.difference(
                self.kept, modules.strip_wrapper_paths(module, [*tolerated])
            )
            if others:
                raise RuntimeError(f"it has not loaded {format_list(sorted(others), _MAX_NAMES)}")
            now = module.state_dict() if self.checked else {}
        changed = [
            k
            for n, k in self.checked.items()
            if converted.isdisjoint(_paths_of(n))
            and not _are_same(now.get(self.names[n]), loaded[self.names[n]])
        ]
        if changed:
            warn_user(
                f"The load_state_dict() of {key!r}, {with_article(type(module).__name__)}, has not"
                f" loaded what was saved: {format_list(changed, _MAX_NAMES)}",
                InexactResume,
            )
        return module

    @cached_property
    def paths(self) -> dict[str, str]:
        """The paths of the submodules, each with that without wrappers."""
        paths = [path for path, _ in self.module.named_modules(remove_duplicate=False)]
        return dict(zip(paths, modules.strip_wrapper_paths(self.module, paths), strict=True))

    @cached_property
    def own_paths(self) -> dict[str, str]:
        """The live paths of submodules that load their members by own code, by those without
        wrappers: if it has two, the outermost."""
        module = self.module
        if _is_overridden(module):
            return {"": ""}
        if not any(map(_has_own_load, modules.submodules_of(module))):
            return {}
        outermost_last = [*self.paths.items()][::-1]
        return {plain: p for p, plain in outermost_last if _has_own_load(module.get_submodule(p))}

    def _choose_versions(self, bound: Iterable[str]) -> tuple[dict[str, Any], set[str]]:
        """Return the metadata for a state dict: what was saved of submodules with ``bound`` members
        (nothing in files without it: no version, as in PyTorch), else the live one. Also return
        where the saved one differs from that."""
        saved = dict(self.versions) if isinstance(self.versions, dict) else {}
        others = saved.pop(tree.OTHER_MODULES, None)
        live = getattr(self.state, "_metadata", None) or {}
        touched = {path for name in bound for path in _paths_of(name)}
        differs: dict[str, bool] = {}
        for path, plain in self.paths.items():
            entry = live.get(path)
            if plain in touched:  # a wrapper comes before its module
                entry = copy.copy(saved.get(plain, saved.get(path, others)))
                differs[plain] = entry != live.get(path)
            saved[path] = {} if entry is None else entry
        return saved, {path for path, is_other in differs.items() if is_other}

    def try_own_code(self, members: Members) -> dict[str, str]:
        """Try the own code of the submodules for which saved members have other names or shapes.
        Return the live names of what it gets, by those without wrappers."""
        binding, leaves = self.binding, self.binding.targets.snapshot.leaves

        def differs(name: str) -> bool:
            child, k = members.get(name, (None, join_key(self.key, escape_level(name))))
            if not binding.selected(k):
                return False
            if name not in self.names or name not in members:
                return True
            value, source = self.state[self.names[name]], binding.tensor_source(child, k)
            if source is None or not _is_dense(value):
                return False
            return leaves[source][1] != tuple(value.shape)

        differing = () if binding.targets.is_dry else filter(differs, {**self.names, **members})
        converted: dict[str, str] = {}
        for owner in dict.fromkeys(_owner(name, self.own_paths) for name in differing):
            if owner is not None:
                converted |= self._try(owner, self.own_paths[owner], members)
        return converted

    def bind_converted(self, name: str, node: Any, key: str) -> None:
        """Bind a saved member that the code gets, unless it was seen to ignore its shape."""
        binding = self.binding
        value: Any = self.state.get(name)
        source = binding.tensor_source(node, key)
        stored, shape = ("", ()) if source is None else binding.targets.snapshot.leaves[source]
        if name in self.ignored:
            binding.note_resized(value, key, shape, value.shape)
            self.dropped.add(name)
            return
        self.fresh[name] = binding.targets.add_fresh(node, key, self.tried[name])
        if name in self.unexpected:
            binding.note_unexpected([(node, key)])
        elif source is None or not _is_dense(value):
            return
        elif shape != tuple(value.shape):  # its slots do not fit
            binding.differences.resized[key] = f"{list(shape)}, live {list(value.shape)}"
        else:
            binding.claim(value, source, key)
            if getattr(torch, stored).is_floating_point == value.is_floating_point():
                binding.array_source(value, node, key)

    def _try(self, owner: str, path: str, members: Members) -> dict[str, str]:
        """Load the saved members of a submodule into a copy of it, by its code, and record what it
        does not load. Return nothing if it cannot be tried, and the differences are reported."""
        binding, start, live_start = self.binding, *(f"{p}." if p else "" for p in (owner, path))
        live = {name: n for n, name in self.names.items() if n.startswith(start)}
        for name, n in live.items():  # hooks of a wrapper may have removed its level
            if name.endswith(n[len(start) :]):
                live_start = name[: len(name) - len(n) + len(start)]
        converted = {
            n: self.names.get(n, live_start + n[len(start) :])
            for n, (_, k) in members.items()
            if n.startswith(start) and binding.selected(k)
        }
        is_distributed = any(sharding.is_distributed_tensor(self.state[name]) for name in live)
        has_subclass = any(tree.tag_of(members[n][0]) == "subclass" for n in converted)
        if not converted or is_distributed or has_subclass:
            return {}
        sub = self.module.get_submodule(path)
        first = next(chain(sub.parameters(), sub.buffers()), None)
        device = None if first is None or first.is_meta else first.device
        targets = LoadTargets(binding.targets.snapshot, is_live=True)
        finalizers = {
            name.removeprefix(live_start): targets.add_fresh(*members[n], device)
            for n, name in converted.items()
        }
        # without headers, because all ranks of a shared read must check the same ones later
        targets.snapshot.read(targets.requests, targets.targets, check_headers=False)
        given: Any = OrderedDict((name, finalize()) for name, finalize in finalizers.items())
        versions, above = self._choose_versions(self.names)[0], f"{path}." if path else ""
        given._metadata = {
            p[len(above) :]: v for p, v in versions.items() if f"{p}.".startswith(above)
        }
        # of a submodule, PyTorch calls no load_state_dict()
        load = partial(torch.nn.Module.load_state_dict, strict=False) if path else _load_state_dict
        try:
            twin = _copy_module(sub)
            unloaded = {
                name: _mark(value).clone()
                for name, value in twin.state_dict().items()
                if _is_dense(value) and value.shape != getattr(given.get(name), "shape", None)
            }
            with suppress(RuntimeError):  # PyTorch raises it for other shapes, after all others
                load(twin, copy.copy(given))
            now = twin.state_dict()
            left = {n for n, value in unloaded.items() if torch.equal(now[n], value)}
            ignored = left & given.keys()
            for name in ignored:
                del given[name]
            missing, unexpected = load(twin, given)
            if load is _load_state_dict and _is_overridden(twin):  # it does not say what it lacks
                missing = left
        except Exception:  # noqa: BLE001  (of the module's code: the differences are reported)
            return {}
        self.missing.update(live_start + n for n in {*missing} - ignored)
        self.unexpected.update(live_start + n for n in unexpected)
        self.ignored.update(live_start + n for n in ignored)
        self.tried |= dict.fromkeys((*live, *converted.values()), device)
        return converted


def _mark(value: Any) -> Any:
    """Fill a tensor with an element that hardly any code loads, and return it."""
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return value.fill_(torch.iinfo(value.dtype).max - 6 if is_integer else 0.739)


def _load_state_dict(module: Any, given: Any) -> Any:
    """Load by the module's method. Return the missing and the unexpected names, unless it is not
    that of PyTorch, which may have other arguments and results."""
    if _is_overridden(module):
        module.load_state_dict(given)
        return (), ()
    return module.load_state_dict(given, False)


def _is_overridden(module: Any) -> bool:
    """Return True if ``load_state_dict`` is not PyTorch's, in the class or of this object."""
    method = getattr(module.load_state_dict, "__func__", module.load_state_dict)
    return method is not torch.nn.Module.load_state_dict


def _copy_module(module: Any) -> Any:
    """Copy a module, its submodules, hooks, parameters, and buffers. The rest is shared: it may be
    large, such as a trainer, or something that cannot be copied."""
    own = vars(torch.nn.Module()).keys()
    others = (v for sub in module.modules() for name, v in vars(sub).items() if name not in own)
    copied = torch.nn.Module, torch.nn.Parameter, torch.nn.Buffer
    return copy.deepcopy(module, {id(v): v for v in others if not isinstance(v, copied)})


def _paths_of(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a member, the outermost first."""
    return chain(("",), accumulate(name.split(".")[:-1], "{}.{}".format))


def _owner(name: str, paths: dict[str, str]) -> str | None:
    return next((path for path in _paths_of(name) if path in paths), None)


def _memory_key(value: Any, key: str) -> object:
    """Return a key that identifies a tensor's memory: its address, or for a distributed tensor the
    storage of the boxes that this rank has."""
    return part_library(type(value)).local_boxes(value, key).tie_key


def _is_dense(value: Any) -> bool:
    """Return True for a tensor with memory that bytes can be written to."""
    return (
        isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and value.layout is torch.strided
        and not value.is_nested
        and not composites.is_subclass(value)
    )


def _are_same(a: Any, b: Any) -> bool:
    """Return True if two tensors have the same elements, also NaN."""
    a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
    is_comparable = isinstance(a, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
    return is_comparable and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())


def _has_own_load(sub: Any) -> bool:
    """Return True if code that is not PyTorch's own loads the members of a submodule. PyTorch's
    hooks and layers only handle old versions of their state, and wrappers."""
    hooks = (*sub._load_state_dict_pre_hooks.values(), *sub._load_state_dict_post_hooks.values())
    own = ("torch.nn.modules.", "torch.distributed.")
    return any(
        not str(getattr(code, "__module__", "")).startswith(own)
        for code in (sub._load_from_state_dict, *hooks)
    )
