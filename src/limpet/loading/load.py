"""The load recipe. Read it from top to bottom; it calls every step, and each step returns to it.

1. The caller is ``limpet.load``, or a resume, which loads versions until one is intact.
2. The caller has found the snapshot: ``run/address.py``, or ``run/lineage.py`` and the tiers.
3. Manifest and indexes: ``SnapshotReader`` reads them, and validates them completely.
4. Bind: match the tree with the live state. This raises an error that lists all differences, or
   gives every leaf a target. The read plan says which chunks have the bytes.
5. Read merged ranges of the shards, under a byte budget.
6. Check the digests, and copy into the targets. Then finalize: set plain values and options, call
   ``load_state_dict``, and restore the random generators last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from limpet import events
from limpet.arguments import require
from limpet.buffers import enough_memory
from limpet.errors import InexactResume, LimpetError, RankFailed
from limpet.format.tree import walk
from limpet.layout.select import ABSENT, make_key_filter, prune, rename
from limpet.loading.binder import bind_state
from limpet.loading.binding import STATE_INVALID, Binding
from limpet.loading.differences import STRICT, Differences, Leniency, LoadReport, no_match_error
from limpet.loading.shared_memory import check_shared_memory
from limpet.loading.shared_read import SharedReader, open_shared_reader
from limpet.loading.targets import Finalize, LoadTargets, device_chooser
from limpet.ranks.collective import Collective, await_all
from limpet.ranks.group import Group
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import ParameterNames
from limpet.state.walk import check_replaceable
from limpet.text import warn_user
from limpet.threads import gc_paused


def load_snapshot(
    snapshot: SnapshotReader,
    into: Mapping[str, Any] | None = None,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    leniency: Leniency = STRICT,
    group: Group | None = None,
) -> Any:
    """Load an open snapshot as ``limpet.load`` does; return the state, or the ``LoadReport`` of a
    load ``into`` a live state. Without a ``group``, this process loads alone."""
    group = Group() if group is None or into is None else group
    limit = snapshot.location.deadline
    collective = group.collective(f"the load of {snapshot.location.name}", deadline=limit)
    try:
        # One pin protects all ranks, because no rank reads before the broadcast.
        pin = snapshot.pin_while_reading() if group.rank == 0 else nullcontext()
        with collective, enough_memory(f"the load of {snapshot.location.name}"), pin:
            targets = LoadTargets(snapshot, device_chooser(device), is_live=into is not None)
            with open_shared_reader(snapshot, collective) as reader:
                return _load(reader, into, keys, targets, leniency, collective)
    finally:
        collective.close()


def _load(
    reader: SnapshotReader | SharedReader,
    into: Mapping[str, Any] | None,
    keys: str | Sequence[str] | None,
    targets: LoadTargets,
    leniency: Leniency,
    collective: Collective,
) -> Any:
    # step 3, before any memory is allocated: the indexes prove that the bytes for the shapes exist
    reader.indexes()
    try:  # step 4
        finalize, report, reassigned = _bind(targets, into, keys, leniency, collective)
    except RankFailed as e:
        if e.is_state_invalid or isinstance(e.__cause__, LimpetError):
            raise  # the error already states whether the other rank had begun to read
        raise e.with_advice(STATE_INVALID, live_state="not valid") from e
    if reassigned and collective.rank == 0:
        warn_user(
            f"The per-rank values in {targets.snapshot.url} do not match the ranks that load them:"
            f" {reassigned}. A rank without a saved value keeps its own, and the values of other"
            " ranks are ignored. If a value counts the data that one rank has seen, some samples"
            " will be repeated and some skipped; limpet.DataLoader continues with any number of"
            " ranks.",
            InexactResume,
        )
    try:  # steps 5 and 6
        with enough_memory(f"the load of {targets.snapshot.location.name}"):
            reader.read(targets.requests, targets.targets, collective.advance)
            loaded = gc_paused(finalize)()
        await_all(collective)
    except BaseException as e:
        if into is None or (isinstance(e, LimpetError) and e.is_state_invalid):
            raise
        if isinstance(e, LimpetError):
            raise e.with_advice(STATE_INVALID, live_state="not valid") from e
        e.add_note(STATE_INVALID)
        raise
    events.emit(
        "loaded",
        url=targets.snapshot.url,
        leaves=len(targets.requests),
        kept=len(report.kept),
        ignored=len(report.ignored),
        cast=len(report.cast),
        summary=report.summary,
    )
    return loaded if into is None else report


@gc_paused
def _bind(
    targets: LoadTargets,
    into: Mapping[str, Any] | None,
    keys: str | Sequence[str] | None,
    leniency: Leniency,
    collective: Collective,
) -> tuple[Finalize, LoadReport, str]:
    """Give every requested leaf a target; the live state stays. Return what finishes the load, its
    report, and a description of per-rank values that other ranks load than saved them."""
    snapshot, selected = targets.snapshot, make_key_filter(keys)
    tree = snapshot.manifest.tree
    if leniency.rename:
        tree = rename(tree, leniency.rename)
    if into is None:
        tree = prune(tree, selected)
        if tree is ABSENT:
            raise no_match_error(snapshot, keys)
        return targets.add_fresh(tree, ""), LoadReport(snapshot.url, (), {}, (), {}, {}), ""
    expected = 'a dict like the one that was saved, such as {"model": model}'
    require("into=", isinstance(into, Mapping), expected, into)
    check_replaceable("into=", into)
    names = ParameterNames(into)

    def bind_once(resized: dict[str, str], taken: frozenset[str]) -> tuple[Finalize, Differences]:
        shared = taken if collective.size > 1 else None
        binding = Binding(targets, selected, names, collective.rank, leniency, resized, shared)
        finalize = bind_state(binding, into, tree)
        check_shared_memory(binding.claims, snapshot)
        return finalize, binding.differences.of_all_ranks(collective)

    finalize, found = bind_once({}, frozenset())
    taken = frozenset(found.growing).intersection(found.unexpected)
    if found.resized or taken:
        # again, because the slots of resized parameters are kept, and a parameter may come after
        # its optimizer. What one rank keeps or takes, all ranks do.
        del finalize
        targets.clear()
        finalize, found = bind_once(found.resized, taken)
    saved = [key for key, _ in walk(tree) if selected(key)]
    if keys is not None and not (targets.requests or saved):
        raise no_match_error(snapshot, keys)
    found.raise_if_any(snapshot.url, tree, leniency)
    report = found.report(snapshot, saved, leniency.rename)
    return finalize, report, found.describe_reassigned()
