"""The live values that a resume has kept, because the version lacks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from limpet.data.progress import Progress
from limpet.errors import KeptValues
from limpet.format.tree import walk
from limpet.layout.match import Match
from limpet.lazy_torch import torch_or_none
from limpet.loading.differences import fold_keys, format_keys
from limpet.loading.report import MISSING, LoadReport
from limpet.ranks.collective import Collective
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import flatten
from limpet.state.walk import find_named_instances
from limpet.text import warn_user
from limpet.training.resume_point import ResumePoint


def note_kept(point: ResumePoint, state: dict[str, Any], collective: Collective) -> ResumePoint:
    """Return ``point`` with the keys of the values that were kept on any rank in its note, which
    later versions store. Warn of them on rank 0. All ranks call this after the load."""
    own = find_kept(point.snapshot, state, collective.rank)
    gathered = collective.gather(own, list[str])
    kept = None if gathered is None else sorted({key for keys in gathered for key in keys})
    kept = collective.broadcast(kept, list[str])
    if not kept:
        return point
    if collective.rank == 0:
        names = format_keys(fold_keys(kept, point.snapshot.nodes()))
        epochs = [name for name in _progress_names(state) if f"{name}/epoch" in kept]
        advice = f". Set {epochs[0]}.epoch before the loop over epochs" if epochs else ""
        warn_user(
            f"{point.snapshot.url} lacks {len(kept)} keys of the live state, whose values were kept"
            f' because of missing="keep": {names}. The training does not continue exactly with'
            f" respect to them{advice}. The versions that it saves record this",
            KeptValues,
        )
    recorded = {"version": str(point.snapshot.version), "keys": kept}
    return replace(point, note={**point.note, "kept": recorded})


def find_kept(snapshot: SnapshotReader, state: dict[str, Any], rank: int) -> list[str]:
    """Return the keys of the live state that a snapshot lacks. A value that is stored per rank, or
    taken from the first rank, has one key."""
    saved = set(snapshot.nodes())
    above = {key[:i] for key in saved for i, c in enumerate(key) if c == "/"}
    kept = []
    for key, node in walk(flatten(state, rank).tree):
        is_of_ranks = type(node) is dict and not node.keys().isdisjoint(("own", "first"))
        if key not in saved and not (is_of_ranks and key in above):
            kept.append(key)
    steps = {f"{name}/step" for name in _progress_names(state)}
    return [key for key in kept if key not in steps]  # set to the step of the version


def _progress_names(state: dict[str, Any]) -> list[str]:
    return [name for name, value in state.items() if isinstance(value, Progress)]


def warn_of_unloaded(report: LoadReport, state: dict[str, Any]) -> None:
    """Warn of each module with parameters of which a start has loaded nothing, although it has
    ignored values of the version that have the same key or similar names."""
    torch: Any = torch_or_none()
    if torch is None or not (report.kept and report.ignored):
        return
    lacking = [key for key, reason in report.kept.items() if reason == MISSING]
    ignored = [*report.ignored]
    for name, module in find_named_instances(state, torch.nn.Module, separator="/"):
        kept = [key for key in lacking if key.startswith(f"{name}/")]
        is_loaded = any(key.startswith(f"{name}/") for key in report.loaded)
        if not kept or is_loaded or next(module.parameters(), None) is None:
            continue
        rename = Match.find(kept, ignored, ignored, report.url).rename
        if not rename and not any(key.startswith(f"{name}/") for key in ignored):
            continue  # the version has nothing similar: the module is new
        warn_user(
            f"The start from {report.url} has loaded no value of {name}, which keeps all of its"
            f" {len(kept)} live values. It has ignored {format_keys(fold_keys(ignored, []))}. If"
            f" these are values of {name} under other names, use another folder and pass"
            f" rename={rename or '{OLD: NEW}'}",
            KeptValues,
        )
