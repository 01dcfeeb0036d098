"""Early checks of a Checkpointer's arguments and run, for mistakes that would show much later."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from limpet.arguments import check_seconds, require
from limpet.errors import LimpetError, PlanError
from limpet.format.names import parse_version
from limpet.format.tree import MAX_DEPTH
from limpet.run.address import resolve_address
from limpet.run.policy import KeepPolicy, Mode, SavePolicy, StopWhen, contains_at_end
from limpet.run.retention import ignores_metrics
from limpet.run.run import Run
from limpet.run.writer import check_incremental
from limpet.snapshot.location import Location, describe_run, is_snapshot
from limpet.state.loadable import find_unwritable
from limpet.state.modules import EXTRA_STATE
from limpet.state.streamed import Streamed, find_streamed
from limpet.state.walk import check_replaceable
from limpet.storage.local.store import LocalStore
from limpet.text import MAX_SHOWN, format_list, to_repr, with_article
from limpet.tiers.settings import LocalTier, MemoryTier
from limpet.tiers.tiers import Tier
from limpet.training.preemption_plan import Preemption
from limpet.training.state_check import find_members


@dataclass(frozen=True)
class Options:
    """The keyword arguments of a ``Checkpointer``, but for ``group``."""

    save: SavePolicy
    keep: KeepPolicy
    stop: StopWhen | None
    on_best: Callable[[Any], object] | None
    at_end: bool
    save_timeout: float | None
    on_error: Literal["raise", "warn"]
    incremental: bool | int
    overlap: bool
    tiers: Sequence[Tier]
    preemption: Preemption | None
    config: Any  # a node, see ``encode_config``
    metrics_log: bool
    quiet: bool

    @property
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        """The metrics of the policies, with their modes."""
        stop = self.stop
        return self.keep.objectives | ({(stop.metric, stop.mode)} if stop is not None else set())


_OF_RANK_0 = ("keep", "stop", "on_best", "quiet", "config", "metrics_log")


def check_arguments(options: Options) -> dict[str, str]:
    """Return the arguments that must be equal on all ranks as text without addresses, by name.

    Raises ``LimpetError`` for an invalid argument.
    """
    values: dict[str, Any] = vars(options)
    incremental, timeout, tiers = values["incremental"], values["save_timeout"], values["tiers"]
    is_list = isinstance(tiers, Sequence) and not isinstance(tiers, str)
    kinds = list(map(type, tiers)) if is_list else [str]
    expected_values = {
        "save": (isinstance(values["save"], SavePolicy), "a save policy such as EverySteps(500)"),
        "keep": (isinstance(values["keep"], KeepPolicy), "a keep policy such as KeepLast(3)"),
        "stop": (isinstance(values["stop"], StopWhen | None), 'StopWhen("val_loss") or None'),
        "on_best": (options.on_best is None or callable(options.on_best), "a function, or None"),
        "preemption": (isinstance(values["preemption"], Preemption | None), "Preemption() or None"),
        "tiers": (
            len(set(kinds)) == len(kinds) and set(kinds) <= {MemoryTier, LocalTier},
            '[MemoryTier(every=EverySteps(10)), LocalTier("/local/nvme")], one of these, or []',
        ),
        "on_error": (values["on_error"] in ("raise", "warn"), '"raise" or "warn"'),
    }
    for name in ("at_end", "overlap", "metrics_log", "quiet"):
        expected_values[name] = type(values[name]) is bool, "True or False"
    check_incremental(incremental)
    if timeout is not None:
        check_seconds("save_timeout=", timeout, may_be_infinite=True)
    for name, (is_valid, expected) in expected_values.items():
        require(f"{name}=", is_valid, expected, values[name])
    stop, kept = options.stop, options.keep
    keeps_best = type(kept) is KeepPolicy or not ignores_metrics(kept)
    if options.on_best is not None and not (len(options.objectives) == 1 and keeps_best):
        raise LimpetError(
            "on_best= needs one metric with one mode, whose best version is kept: write"
            ' keep=KeepBest(2, "val_loss", mode="min"), or keep all versions with the same for'
            f" stop=StopWhen(...), instead of {sorted(options.objectives) or 'none'} and {kept}"
        )
    modes = {mode for metric, mode in kept.objectives if stop and metric == stop.metric}
    if stop and modes and stop.mode not in modes:
        raise LimpetError(f"{kept} and {stop} contradict each other: use one mode for the metric")
    if contains_at_end(options.save) and not options.at_end:
        raise LimpetError(f"at_end=False contradicts save={options.save}: remove one of the two")
    if incremental and LocalTier in kinds:
        raise LimpetError(
            "A LocalTier cannot be combined with incremental=True: the local disk has no version"
            " that another one could refer to"
        )
    return {
        name: re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:500]
        for name, value in values.items()
        # each host may have its own notices and memory
        if name not in (*_OF_RANK_0, "preemption", "tiers")
    }


def check_ranks_agree(arguments_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise ``PlanError`` if ranks have different arguments: they would save at different steps."""
    for name, expected in arguments_by_rank[0].items():
        for rank, arguments in enumerate(arguments_by_rank):
            if arguments.get(name) != expected:
                raise PlanError(
                    "The Checkpointers of the ranks have different arguments",
                    expected=f"{name}={expected} on all ranks, as on rank 0",
                    found=f"{name}={arguments.get(name)} on rank {rank}",
                    todo="Use the same value on all ranks. Policies that depend on time use the"
                    " clock of rank 0 on all ranks",
                    rank=rank,
                )


def check_state(state: Any) -> Any:
    """Return a state. Raise ``LimpetError`` unless it is a mapping, ``PlanError`` if it is or has
    the ``state_dict()`` of an optimizer or scheduler: such a copy neither changes nor loads into
    it; or a ``DataLoader`` without a position."""
    expected = 'a dict such as {"model": model}, or a function that returns one'
    require("state", isinstance(state, Mapping), expected, state)
    check_replaceable("state", state)
    for key, value in [("", state), *_walk_dicts(state, "", {id(state)})]:
        for kind, is_copy in (
            ("optimizer", value.keys() == {"state", "param_groups"}),
            ("scheduler", value.keys() >= {"last_epoch", "_step_count"}),
            ("model", not key and any(k.endswith(EXTRA_STATE) for k in value if type(k) is str)),
        ):
            if is_copy:
                where = f"{key} in the state" if key else "The state"
                what = f"{where} is the state_dict() of {with_article(kind)}"
                todo = f'write {{"{kind}": {kind}}}, without .state_dict()'
                raise PlanError(f"{what}, a copy made once: {todo}", leaf=key)
    torch_data: Any = sys.modules.get("torch.utils.data")
    for key, loader in find_members(state, torch_data.DataLoader).items() if torch_data else ():
        if not hasattr(getattr(loader, "base_dataloader", loader), "state_dict"):
            raise PlanError(
                f"{key} in the state is a PyTorch DataLoader, which has no position to save: use a"
                " limpet.DataLoader with the same arguments, or limpet.elastic(loader), also after"
                " accelerator.prepare(loader)",
                leaf=key,
            )
    for key, member in find_streamed(state).items():
        for name, value in member.members.items():
            for n, other in state.items():
                if (n == name) is not (other is value):
                    raise LimpetError(f"{n!r} in the state must be left out: {key!r} brings it")
        state = {**state, **member.members}
    return state


def check_streamed(state: Any, options: Options) -> bool:
    """Return True if the state has streamed members. Raises ``LimpetError`` for an option that uses
    copies of the state, which would lack them."""
    used = "tiers=" if options.tiers else "overlap=True" if options.overlap else None
    used = "OnException" if options.save.on_exception else used
    members = find_streamed(state)
    for key in find_members(state, Streamed).keys() - members.keys():
        raise LimpetError(f'{key!r} must be at the top level of the state: {{"tables": servers}}')
    for key in members if used else ():
        raise LimpetError(f"{used} cannot be combined with {key!r} in the state: no copy has it")
    return bool(members)


def check_writable(state: dict[str, Any]) -> None:
    """Raise ``PlanError`` if the state has tensors that a save accepts, but no load can fill."""
    unwritable = find_unwritable(state)
    if unwritable:
        raise PlanError(
            f"{format_list(unwritable, MAX_SHOWN)} in the state could be saved, but never loaded:"
            " several elements share memory, as in an expanded tensor, or the memory is read-only",
            todo="Use tensor.clone(memory_format=torch.contiguous_format), also for a buffer, or"
            " register the buffer with persistent=False if it is a constant",
            leaves=tuple(unwritable),
        )


def _walk_dicts(
    value: Mapping[Any, Any], path: str, seen: set[int], depth: int = 0
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the dicts nested in a state with their paths, each object once (``seen``: their ids).
    The save reports those that are too deep for it."""
    for name, member in value.items() if depth < MAX_DEPTH else ():
        if type(member) is dict and id(member) not in seen:
            seen.add(id(member))
            level = name if type(name) is str else to_repr(name)
            key = f"{path}/{level}" if path else level
            yield key, member
            yield from _walk_dicts(member, key, seen, depth + 1)


def check_not_version(run: Run) -> None:
    """Raise ``LimpetError`` if the folder of a run has the name of a version, or is a file."""
    paths = (Path(run.url), *Path(run.url).parents) if isinstance(run.store, LocalStore) else ()
    for file in filter(os.path.isfile, paths):
        raise LimpetError(f"{run.url} cannot be the folder of a run: {file} is a file")
    if parse_version(run.url.rstrip("/").rpartition("/")[2]) is not None:
        raise _not_a_run_error(run, "the folder of a version")


def check_not_snapshot(run: Run) -> None:
    """Raise ``LimpetError`` if an empty run's URL is that of a snapshot or of a version."""
    other_url, version = resolve_address(run.url)
    if version is not None and Run(other_url).listing().versions:
        raise _not_a_run_error(run, "the address of a version")
    if is_snapshot(Location(run.store, "")):
        raise _not_a_run_error(run, "a snapshot")


def _not_a_run_error(run: Run, found: str) -> LimpetError:
    return LimpetError(
        f"{run.url} is not a run",
        expected="the folder that holds, or will hold, the versions of one training",
        found=found,
        todo="Pass the run itself. resume(at=...) resumes from one of its older versions, and"
        ' resume(start="RUN@STEP") starts another run from a version',
    )


def check_run_empty(run: Run) -> None:
    """Raise ``LimpetError`` if the run has versions: those of two trainings must not mix."""
    versions = run.listing().versions
    if not versions:
        check_not_snapshot(run)
    else:
        raise LimpetError(
            f"{run.url} holds versions of an earlier training",
            expected="an empty run, or a call to resume() before the first step",
            found=f"{describe_run(versions)}, the newest being {versions[-1]}",
            todo="Call ckpt.resume() to continue from it, or save to another folder",
        )
