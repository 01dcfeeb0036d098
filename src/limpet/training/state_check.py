"""What a state lacks so that a resume is exact. It reads only the state, and the generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from limpet import events
from limpet.data.progress import Progress
from limpet.data.rng import RNG
from limpet.data.sampler import ElasticSampler
from limpet.errors import InexactResume
from limpet.format.digest import digest
from limpet.generators import capture_states
from limpet.lazy_torch import torch_or_none
from limpet.state.flatten import flatten
from limpet.state.optimizers import is_standard_optimizer
from limpet.state.replication import PerRank, Replicated
from limpet.state.sharding import is_distributed_tensor
from limpet.state.walk import find_instances, find_named_instances, parameters_of, storage_address
from limpet.text import format_count, format_list, warn_user

_MAX_NAMES = 3


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...


def find_members(value: Any, kind: Any) -> dict[str, Any]:
    """Return the instances of ``kind`` by key, also those in ``PerRank`` and ``Replicated``."""
    found, kinds = {}, (kind, PerRank, Replicated)
    for key, member in find_named_instances(value, kinds, separator="/"):  # type: ignore[arg-type]
        if isinstance(member, PerRank | Replicated):
            inner = find_members(member.value, kind)
            found.update({"/".join(filter(None, (key, k))): m for k, m in inner.items()})
        else:
            found[key] = member
    return found


class StateCheck:
    """Warns once, after the second step. Only what two looks at the state, after the first two
    steps, prove is reported. An object of an unknown class may hold whatever seems to be missing.
    """

    def __init__(self, run_url: str, is_needed: bool) -> None:
        self._run_url, self._is_needed = run_url, is_needed
        self._first: tuple[dict[str, bytes], dict[str, str]] | None = None

    def after_step(self, state: dict[str, Any]) -> None:
        """Look at ``state``. Call this after each step."""
        torch: Any = torch_or_none()
        if not self._is_needed or torch is None:
            return
        members = find_members(state, _Stateful)
        modules = {k: m for k, m in members.items() if isinstance(m, torch.nn.Module)}
        generators, unsaved = _read_generators(torch), _read_unsaved(modules, torch)
        if self._first is None:
            self._first = generators, unsaved
            return
        (first_generators, first_unsaved), self._first, self._is_needed = self._first, None, False
        lost = [key for key, value in first_unsaved.items() if unsaved.get(key, value) != value]
        if lost:  # an event: non-persistent buffers may also be a cache, as of rotary embeddings
            events.emit("members_unsaved", run=self._run_url, members=lost)
        gaps = list[str]()
        scheduler, scaler = torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
        known = torch.nn.Module, torch.optim.Optimizer, scheduler, scaler, Progress, ElasticSampler
        if all(isinstance(m, (*known, RNG)) for m in members.values()):
            if any(first_generators.get(g) not in (None, now) for g, now in generators.items()):
                gaps += _find_random(state, members, torch)
            gaps += _find_untrained(state, modules, torch)
        if gaps:
            warn_user(
                f"A resume of {self._run_url} would not be exact, because the state lacks"
                " something:" + "".join(f"\n- {gap}." for gap in gaps) + "\nTo add a member to an"
                ' existing run, call resume(missing="keep") once.',
                InexactResume,
            )


def _read_generators(torch: Any) -> dict[str, bytes]:
    """Return the states of the generators of PyTorch by name and seed: the state of one that was
    seeded between two looks is no continuation of the first."""
    states = {k: v.numpy().tobytes() for k, v in capture_states().items() if ":" in k}
    seeded = {f"{name} {state[:8].hex()}": state for name, state in states.items()}
    return {f"cpu {torch.initial_seed()}": torch.get_rng_state().numpy().tobytes(), **seeded}


def _find_random(state: Any, members: Mapping[str, Any], torch: Any) -> Iterator[str]:
    """Describe the modules in training mode that draw random numbers, unless the state has an
    ``RNG``, or a tensor of bytes, such as that of ``torch.get_rng_state()``."""
    has_bytes = any(t.dtype == torch.uint8 for t in find_instances(state, torch.Tensor))
    if has_bytes or any(isinstance(m, RNG) for m in members.values()):
        return
    modules = [m for m in members.values() if isinstance(m, torch.nn.Module)]
    parts = (m for module in modules for m in module.modules())
    if names := sorted({type(m).__name__ for m in parts if _draws(m, torch.nn)}):
        drawn = format_list(names, _MAX_NAMES)
        yield f'It has no RNG, but {drawn} draws random numbers. Add "rng": limpet.RNG() to it'


def _draws(module: Any, nn: Any) -> bool:
    names = "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"
    kinds: Any = tuple(getattr(nn, name) for name in names)
    if isinstance(module, kinds):
        return bool(module.training and module.p > 0)
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return bool(module.training and module.dropout > 0)
    return module.training and isinstance(module, nn.RReLU)


def _find_untrained(state: dict[str, Any], modules: Mapping[str, Any], torch: Any) -> Iterator[str]:
    """Describe the parameters that an optimizer has changed, and that the state lacks."""
    lacking: dict[str, list[Any]] = {}
    saved = {id(p) for module in modules.values() for p in module.parameters()}
    for key, optimizer in find_members(state, torch.optim.Optimizer).items() if modules else ():
        for p in parameters_of(optimizer) if is_standard_optimizer(optimizer) else ():
            # fully_shard replaces the sharded parameters of a module during a forward pass
            is_known = id(p) in saved or is_distributed_tensor(p)
            if not is_known and p.requires_grad and (p.grad is not None or optimizer.state.get(p)):
                lacking.setdefault(key, []).append(p)
    # a tensor or an array of the state, or what a module adds to its state, may share the memory
    sources = [leaf.source for leaf in flatten(state).leaves] if lacking else []
    addresses = {0} | {
        storage_address(s) if isinstance(s, torch.Tensor) else s.__array_interface__["data"][0]
        for s in sources
    }
    for key, parameters in lacking.items():
        shapes = [str([*p.shape]) for p in parameters if storage_address(p) not in addresses]
        if shapes:
            yield (
                f"It lacks {format_count(len(shapes), 'parameter')} of {key}"
                f" ({format_list(shapes, _MAX_NAMES)}): no module in the state has them. Add their"
                " module, not a copy of it. If parameters of a module were replaced after the"
                " optimizer was created (a new layer, fully_shard), create it afterwards"
            )


def _read_unsaved(modules: Mapping[str, Any], torch: Any) -> dict[str, str]:
    """Return a digest of the buffers of each module in the state that saves nothing."""
    found = {}
    for key, module in modules.items():
        buffers = [b for b in module.buffers() if b.layout is torch.strided and not b.is_meta]
        if buffers and next(module.parameters(), None) is None and not module.state_dict():
            raw = (b.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for b in buffers)
            found[key] = digest(b"".join(r.numpy().tobytes() for r in raw))
    return found
