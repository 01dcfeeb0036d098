"""The load recipe. Read it from top to bottom; it calls every step, and each step returns to it.

1. Open the manifest, which is validated completely.
2. Bind: match the snapshot's tree with the live state. This raises an error that lists all
   differences, or gives every leaf a target.
3. Plan the reads, read, check the digests, and copy.
4. Finalize: set plain values and options, and call ``load_state_dict``. Restore the random
   generators last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from holdfast import events
from holdfast.engine.distributed.collective import Collective, await_all
from holdfast.engine.distributed.group import (
    Group,
    GroupSpec,
    LocalGroup,
    current_group,
    failing_together,
)
from holdfast.engine.loading.binder import Binder
from holdfast.engine.loading.binding import STRICT, Leniency, warn_of_share
from holdfast.engine.loading.differences import no_match_error
from holdfast.engine.loading.shared_read import SharedReader, is_worth_sharing, open_shared_reader
from holdfast.engine.loading.targets import Finalize, LoadTargets
from holdfast.engine.planning.select import ABSENT, make_key_filter, prune, rename
from holdfast.engine.snapshot.location import Url, locate
from holdfast.engine.snapshot.snapshot import Snapshot, open_location
from holdfast.engine.state import modules
from holdfast.errors import HoldfastError, PlanError, RankFailed, RanksChanged
from holdfast.generators import Isolation
from holdfast.text import warn_user, with_article
from holdfast.threads import gc_paused


def load(  # noqa: PLR0913  (the public face)
    url: Url,
    into: dict[str, Any] | None = None,
    *,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    group: GroupSpec = None,
    share: bool | None = None,
    timeout: float | None = None,
) -> Any:
    """Load the snapshot at ``url`` and check every byte that is read.

    Without ``into``, return a new dict of tensors on ``device`` (the CPU if None), arrays, and
    plain values. With ``into``, a dict like the one that was saved, fill that dict in place and
    return it. ``keys``: load only leaves whose key matches. ``"model"`` selects that leaf or all
    leaves below it; ``*`` matches within a level, ``**`` across levels.

    The load is strict by default. ``missing="keep"`` keeps live values that the snapshot lacks,
    ``unexpected="ignore"`` ignores leaves that the live state lacks, and ``cast=True`` converts
    dtypes. ``rename={"model/old": "model/new"}`` renames members of the snapshot, with everything
    below them, before they are matched with the live state. A load fails after ``timeout`` seconds.

    Under torch.distributed, all ranks load ``into`` their live states together, whatever layout the
    snapshot was saved with, or all raise. If several ranks of a host need the same data of a large
    snapshot, one reads it and passes it on through shared memory (64 MiB per host). A load without
    ``into`` or with ``group="alone"`` concerns this process only. ``share`` is deprecated. Raises
    ``NotFound``, ``FormatError``, ``StoreError``, or a ``PlanError`` that lists all differences,
    after which ``into`` is unchanged.
    """
    warn_of_share(share)
    leniency = Leniency(missing, unexpected, cast, rename or {})
    ranks = LocalGroup() if into is None else current_group(group)
    location = locate(url).limit("load", timeout)
    with failing_together(ranks, f"the load of {location.url}", location.deadline):
        snapshot = open_location(location)
    return load_snapshot(snapshot, into, keys, device, leniency, ranks)


def load_snapshot(
    snapshot: Snapshot,
    into: dict[str, Any] | None = None,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    leniency: Leniency = STRICT,
    group: Group | None = None,
) -> Any:
    """Load an open snapshot, as ``load`` does. Without a ``group``, this process loads alone."""
    group = LocalGroup() if group is None or into is None else group
    limit = snapshot.location.deadline
    collective = group.collective(f"the load of {snapshot.location.name}", deadline=limit)
    targets = LoadTargets(snapshot, device)
    try:
        # One pin protects all ranks, because no rank reads before the broadcast.
        with collective, snapshot.pin_while_reading() if group.rank == 0 else nullcontext():
            is_shared = group.size > 1 and is_worth_sharing(snapshot)
            is_shared = collective.broadcast(is_shared if group.rank == 0 else None, bool)
            with (
                open_shared_reader(snapshot, collective)
                if is_shared
                else nullcontext(snapshot) as reader
            ):
                return _load(reader, into, keys, targets, leniency, collective)
    finally:
        collective.close()


_STATE_INVALID = (
    "The live state may be partly overwritten and is not valid; load an intact version into it"
    " before training continues"
)


def _load(
    reader: Snapshot | SharedReader,
    into: dict[str, Any] | None,
    keys: str | Sequence[str] | None,
    targets: LoadTargets,
    leniency: Leniency,
    collective: Collective,
) -> Any:
    # before any memory is allocated: the indexes prove that the bytes for the shapes exist
    reader.indexes()
    try:
        finalize, reassigned = _bind(targets, into, keys, leniency, collective)
    except RankFailed as e:
        if e.is_state_invalid or isinstance(e.__cause__, HoldfastError):
            raise  # the error already states whether the other rank had begun to read
        raise e.with_advice(_STATE_INVALID, live_state="not valid") from e
    if reassigned and collective.rank == 0:
        warn_user(
            f"The per-rank values in {targets.snapshot.url} do not match the ranks that load them:"
            f" {reassigned}. If a value counts the data that one rank has seen, some samples will"
            " be repeated and some skipped; holdfast.ElasticSampler continues with any number of"
            " ranks.",
            RanksChanged,
        )
    try:
        reader.read(targets.requests, targets.targets, collective.advance)
        with Isolation("load"):
            loaded = gc_paused(finalize)()
        await_all(collective)
    except BaseException as e:
        if into is None or (isinstance(e, HoldfastError) and e.is_state_invalid):
            raise
        if isinstance(e, HoldfastError):
            raise e.with_advice(_STATE_INVALID, live_state="not valid") from e
        e.add_note(_STATE_INVALID)
        raise
    events.emit("loaded", url=targets.snapshot.url, leaves=len(targets.requests))
    return loaded


@gc_paused
@Isolation("call")
def _bind(
    targets: LoadTargets,
    into: dict[str, Any] | None,
    keys: str | Sequence[str] | None,
    leniency: Leniency,
    collective: Collective,
) -> tuple[Finalize, str]:
    """Give every requested leaf a target, live or fresh, without changing the live state.

    Return a function that returns the loaded state after the bytes are read, and a description of
    the per-rank values that other ranks load than saved them. Raises ``PlanError``.
    """
    snapshot, selected = targets.snapshot, make_key_filter(keys)
    tree = snapshot.manifest.tree
    if leniency.rename:
        tree = rename(tree, leniency.rename)
    if into is None:
        tree = prune(tree, selected)
        if tree is ABSENT:
            raise no_match_error(snapshot, keys)
        return targets.add_fresh(tree, ""), ""
    if not isinstance(into, dict):
        raise PlanError(
            f"into= is {with_article(type(into).__name__)}",
            expected='a dict like the one that was saved, such as {"model": model}',
            found=type(into).__name__,
        )
    names = modules.parameter_names(into)
    binder = Binder(targets, selected, names, collective.rank, leniency.cast, leniency.rename)
    finalize = binder.bind(into, tree, "")
    binder.differences.combine_ranks(collective)
    binder.differences.raise_if_any(
        snapshot.url,
        tree,
        selected,
        missing=leniency.missing == "error",
        unexpected=leniency.unexpected == "error",
    )
    if keys is not None and not targets.requests and not any(map(selected, snapshot.nodes())):
        raise no_match_error(snapshot, keys)
    return finalize, binder.differences.describe_reassigned()
