"""Loading: the recipe. Read it from top to bottom; every step is called from here and returns here.

1. The manifest, totally validated. 2. Bind: the snapshot's tree against what is wanted; all
differences at once, or a target for every leaf. 3. Plan the reads, read, check, copy. 4. Settle:
plain values, options, ``load_state_dict``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from holdfast import events
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import GroupSpec, current_group, use_group
from holdfast.engine.loading.binder import Binder
from holdfast.engine.loading.binding import STRICT, Leniency
from holdfast.engine.loading.shared_read import SharedReader, open_shared_reader
from holdfast.engine.loading.targets import Finalize, LoadTargets
from holdfast.engine.planning.select import ABSENT, make_key_filter, prune, rename
from holdfast.engine.snapshot.location import Url
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.engine.state import modules
from holdfast.errors import HoldfastError, MissingLeaf, PlanError, RankFailed, RanksChanged
from holdfast.text import with_article
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
    share: bool = False,
) -> Any:
    """Load the snapshot at ``url``; every byte is checked.

    Without ``into``: a new dict of tensors on ``device`` (the CPU if None), arrays and plain
    values. With ``into``: a dict like the one that was saved, filled in place and returned.
    ``keys``: only leaves whose key matches: ``"model"`` is that leaf or all below it; ``*``
    stands for anything within a level, ``**`` across levels.

    Strict unless asked otherwise: ``missing="keep"`` leaves live what the snapshot lacks,
    ``unexpected="ignore"`` passes over what the live state lacks, ``cast=True`` converts dtypes,
    ``rename={"model/old": "model/new"}`` gives members of the snapshot, each with all below it,
    the names of the live state first.

    Under torch.distributed all ranks load ``into`` their live states together, whatever layout the
    snapshot was saved with: each reads what it needs, and all succeed or all raise.
    ``group="alone"`` loads in this process only, as a load without ``into`` always does.
    ``share=True``: what several ranks of one host need, one of them reads from the store, and
    passes on through shared memory (256 MiB for each host). All ranks must ask for it.

    Raises ``NotFound``, ``FormatError``, ``StoreError``, or a ``PlanError`` that lists every
    difference; before any of the last kind nothing of ``into`` has been changed.
    """
    leniency = Leniency(missing, unexpected, cast, rename or {})
    with use_group(current_group(group)):
        return load_snapshot(open_snapshot(url), into, keys, device, leniency, share)


def load_snapshot(
    snapshot: Snapshot,
    into: dict[str, Any] | None = None,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    leniency: Leniency = STRICT,
    share: bool = False,
) -> Any:
    """``load``, of a snapshot that is open."""
    group = current_group("alone" if into is None else None)
    meeting = group.collective(f"the {'shared ' if share else ''}load of {snapshot.url}")
    try:
        # one pin is enough, if nobody reads before it is there
        with meeting, snapshot.pin_while_reading() if group.rank == 0 else nullcontext():
            meeting.broadcast(True if group.rank == 0 else None, bool)
            together = share and group.size > 1
            with (
                open_shared_reader(snapshot, meeting)
                if together
                else nullcontext(snapshot) as source
            ):
                return _load(source, into, keys, LoadTargets(snapshot, device), leniency, meeting)
    finally:
        meeting.close()


_STATE_INVALID = (
    "The live state may have been overwritten in part and is not valid: load an intact version into"
    " it before going on"
)


def _load(
    reader: Snapshot | SharedReader,
    into: dict[str, Any] | None,
    keys: str | Sequence[str] | None,
    targets: LoadTargets,
    leniency: Leniency,
    collective: Collective,
) -> Any:
    reader.indexes()  # before any memory is taken: the bytes behind the shapes are there
    try:
        settle, moved = _bind(targets, into, keys, leniency, collective)
    except RankFailed as e:
        if e.fields.get("live_state") or isinstance(e.__cause__, HoldfastError):
            raise  # it says of itself whether that rank had read already
        raise e.with_advice(_STATE_INVALID, live_state="not valid") from e
    if moved and collective.rank == 0:
        _warn_reassigned(targets.snapshot.url, moved)
    try:
        reader.read(targets.requests, targets.targets, collective.advance)
        loaded = settle()
        collective.gather(True, bool)
        collective.broadcast(True if collective.rank == 0 else None, bool)
    except BaseException as e:
        if into is None or (isinstance(e, HoldfastError) and e.fields.get("live_state")):
            raise
        if isinstance(e, HoldfastError):
            raise e.with_advice(_STATE_INVALID, live_state="not valid") from e
        e.add_note(_STATE_INVALID)
        raise
    events.emit("loaded", url=targets.snapshot.url, leaves=len(targets.requests))
    return loaded


@gc_paused()
def _bind(
    targets: LoadTargets,
    into: dict[str, Any] | None,
    keys: str | Sequence[str] | None,
    leniency: Leniency,
    collective: Collective,
) -> tuple[Finalize, str]:
    """Give every leaf that is wanted a target, live or fresh; nothing live is touched.

    Returns what gives the loaded state once the bytes are in, and what of single ranks goes to
    others, in words. Raises ``PlanError``.
    """
    snapshot, selected = targets.snapshot, make_key_filter(keys)
    tree = snapshot.manifest.tree
    if leniency.rename:
        tree = rename(tree, leniency.rename)
    if into is None:
        tree = prune(tree, selected)
        if tree is ABSENT:
            raise _no_match_error(snapshot, keys)
        return targets.add_fresh(tree, ""), ""
    if not isinstance(into, dict):
        raise PlanError(
            f"into= is {with_article(type(into).__name__)}",
            expected='a dict like the one that was saved, such as {"model": model}',
            found=type(into).__name__,
        )
    names = modules.parameter_names(into)
    binder = Binder(targets, selected, names, collective.rank, leniency.cast, leniency.rename)
    settle = binder.bind(into, tree, "")
    binder.differences.combine_ranks(collective)
    binder.differences.raise_if_any(
        snapshot.url,
        tree,
        selected,
        missing=leniency.missing == "error",
        unexpected=leniency.unexpected == "error",
    )
    if keys is not None and not targets.requests and not any(map(selected, snapshot.nodes())):
        raise _no_match_error(snapshot, keys)
    return settle, binder.differences.describe_reassigned()


def _warn_reassigned(url: str, reassigned: str) -> None:
    """Warn at the program's own line: there are more or fewer calls of ours above it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("holdfast."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"What each rank keeps of its own in {url} does not fit the ranks that load it:"
        f" {reassigned}. If it counts what one rank has seen of the data, some will come twice and"
        " some never;"
        " holdfast.ElasticSampler goes on with any number of ranks.",
        RanksChanged,
        stacklevel=level,
    )


def _no_match_error(snapshot: Snapshot, keys: Any) -> MissingLeaf:
    return MissingLeaf(
        f"No leaf of {snapshot.url} matches",
        expected=f"keys like {keys!r}",
        found=", ".join(snapshot.keys()[:10]),
        todo="`holdfast show SNAPSHOT --keys '**'` prints the keys; * stays within a level, **"
        " crosses levels",
    )
