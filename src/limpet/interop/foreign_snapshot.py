"""A foreign checkpoint as a snapshot that a load can read.

The engine's own load compares it with the live state, and copies the bytes from the files into the
live tensors. Nothing is saved, and no tensor is held in memory twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from limpet import events
from limpet.format.index import ShardIndex
from limpet.format.manifest import Manifest
from limpet.interop.arrange import arrange_state
from limpet.interop.import_ import flatten_foreign_state
from limpet.interop.members import match_members, read_members
from limpet.interop.stored_files import StoredFile, StoredTensor
from limpet.layout.read_plan import ReadRequest
from limpet.snapshot.location import Location
from limpet.snapshot.read import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import LocalLeaf
from limpet.text import format_list, warn_user
from limpet.threads import Workers, no_op
from limpet.types import Box

_MAX_LISTED = 20


class ForeignSnapshotReader(SnapshotReader):
    """A foreign checkpoint, or the part of it that a live state has.

    ``kind``: what wrote it. ``left_out``: its members without a place in the live state.
    ``renames_within``: the renames that apply to parts of members, not to whole ones.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        leaves: Sequence[LocalLeaf],
        kind: str,
        left_out: Sequence[str],
        files: Sequence[StoredFile],
        renames: Mapping[str, str],
    ) -> None:
        specs = {leaf.key: (leaf.dtype, leaf.shape) for leaf in leaves}
        super().__init__(location, manifest, "", specs)
        self.kind, self.left_out = kind, tuple(left_out)
        self.renames_within = renames
        self._files = files
        self._parts: defaultdict[str, list[LocalLeaf]] = defaultdict(list)
        for leaf in leaves:
            self._parts[leaf.key].append(leaf)

    def indexes(self) -> list[ShardIndex]:
        """Return none: the reader of the format has compared all sizes with the files."""
        return []

    def pin_while_reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(
        self,
        requests: Sequence[ReadRequest],
        targets: Sequence[Target],
        advance: Callable[[], object] = no_op,
        *,
        check_headers: bool = True,
    ) -> None:
        """Copy the boxes that ``requests`` requests into their targets.

        Raises ``StoreError``, also if a file in a store was replaced meanwhile.
        """
        pairs = list(zip(requests, targets, strict=True))

        def copy(pair: tuple[ReadRequest, Target]) -> None:
            request, target = pair
            for part in self._parts[request.key]:
                _copy_box(part, request.box, target)

        workers = Workers.create(None, advance, self.location.check_time)
        workers.each(pairs, copy)
        workers.each(self._files, StoredFile.require_unchanged)


def _copy_box(part: LocalLeaf, box: Box, target: Target) -> None:
    """Copy what a part of a leaf and a requested box share into the target of the request."""
    shared = part.box.intersection(box)
    if shared is None:
        return
    source, into = part.source, target.into
    if isinstance(source, StoredTensor):
        source = source.fetch()
    source = source[_slices(shared, part.box)] if shared.sizes else source
    if isinstance(into, np.ndarray):
        source = source if isinstance(source, np.ndarray) else source.numpy()
        into[_slices(shared, box) if shared.sizes else ...] = source
        return
    import torch

    if isinstance(source, np.ndarray):
        source = torch.from_numpy(np.require(source, requirements="W"))
    (into[_slices(shared, box)] if shared.sizes else into).copy_(source)


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the place of a box in a box that contains it."""
    return tuple(
        slice(at - start, at - start + size)
        for at, start, size in zip(box.offsets, outer.offsets, box.sizes, strict=True)
    )


def open_foreign(
    location: Location,
    into: Mapping[str, Any] | None,
    keys: str | Sequence[str] | None,
    renames: Mapping[str, str],
) -> ForeignSnapshotReader:
    """Open the checkpoint at a location for a load into a live state.

    Without ``into``, its content is arranged as ``limpet import`` does. With ``into``, its
    members are assigned to those of the live state: see ``match_members``. What the live state has
    no place for is left out, and a warning and the event ``imported`` list it.

    Raises as ``read_members`` and ``match_members`` do.
    """
    whole = {old: new for old, new in renames.items() if "/" not in old}
    within = {old: new for old, new in renames.items() if "/" in old}
    found = read_members(location)
    checkpoint = found.checkpoint
    if not isinstance(into, dict):  # the load refuses any other
        state, left_out = arrange_state(checkpoint.value, None).state, list(checkpoint.left_out)
        within = dict(renames)
    else:
        matched = match_members(found.members, into, keys, whole, checkpoint.path)
        state, left_out = matched.state, matched.left_out
    flat = flatten_foreign_state(state)
    origin = {"path": checkpoint.path, "kind": found.kind}
    manifest = Manifest(
        attempt="",
        created="",
        writer="",
        step=checkpoint.step,
        branch=0,
        parent=None,
        chain=0,
        shards=(),
        metadata={"imported_from": origin},
        tree=flat.tree,
    )
    if left_out:
        names = format_list(left_out, _MAX_LISTED)
        warn_user(f"Not loaded from {checkpoint.path}: {names}", UserWarning)
    events.emit(
        "imported",
        path=checkpoint.path,
        kind=found.kind,
        step=checkpoint.step,
        left_out=left_out,
    )
    return ForeignSnapshotReader(
        location, manifest, flat.leaves, found.kind, left_out, checkpoint.stored, within
    )
