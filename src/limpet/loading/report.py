"""What a load has loaded, kept, ignored, and converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from limpet.loading.differences import (
    SLOT_OF,
    Differences,
    fold_keys,
    format_keys,
    format_mismatches,
    key_prefixes,
)
from limpet.text import format_list

MISSING = "missing in the snapshot"
"""Why a live value is kept that the snapshot lacks."""

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What a load into a live state did. As text, it has one line for each kind of difference.

    ``url``: the snapshot; ``loaded``: the keys of the leaves and plain values that were loaded;
    ``kept``: the keys of live values that were kept, each with the reason, also of the options of
    an optimizer that the snapshot lacks, unless they are off; ``ignored``: the keys of the snapshot
    that the live state lacks; ``cast``: the keys of the leaves that were converted, each with both
    dtypes; ``renamed``: the renames, as they were passed. Keys that ``keys=`` did not select are
    not listed. All ranks of a load have the same report.
    """

    url: str
    loaded: Sequence[str]
    kept: Mapping[str, str]
    ignored: Sequence[str]
    cast: Mapping[str, str]
    renamed: Mapping[str, str]

    @classmethod
    def from_differences(
        cls, url: str, saved: Sequence[str], differences: Differences, renames: Mapping[str, str]
    ) -> LoadReport:
        """Return the report of a load whose differences were tolerated. ``saved``: the selected
        keys of the snapshot, after ``renames``."""
        shapes = {
            key: text if text.startswith(SLOT_OF) else f"saved {text}"
            for key, text in differences.shapes.items()
        }
        left_out = {*differences.unexpected, *shapes}
        if left_out:  # a sparse tensor is kept as a whole, but saved in parts
            saved = [key for key in saved if left_out.isdisjoint(key_prefixes(key))]
        kept = dict.fromkeys((*differences.missing, *differences.options), MISSING) | shapes
        return cls(
            url,
            tuple(saved),
            kept,
            tuple(differences.unexpected),
            dict(differences.casts),
            dict(renames),
        )

    @property
    def is_complete(self) -> bool:
        """True if no live value was kept and nothing in the snapshot was ignored."""
        return not (self.kept or self.ignored)

    @property
    def is_exact(self) -> bool:
        """True if nothing was kept, ignored, converted, or renamed."""
        return self.is_complete and not (self.cast or self.renamed)

    @property
    def summary(self) -> str:
        """The report as text; empty if nothing was kept, ignored, or converted."""
        return "" if self.is_complete and not self.cast else str(self)

    def __str__(self) -> str:
        missing = [key for key, reason in self.kept.items() if reason == MISSING]
        slots = [key for key, reason in self.kept.items() if reason.startswith(SLOT_OF)]
        shapes = {key: reason for key, reason in self.kept.items() if reason.startswith("saved")}
        renames = [f"{old} to {new}" for old, new in self.renamed.items()]
        others = {
            f"kept {len(shapes)} of another shape": format_mismatches(shapes),
            f"kept {len(slots)} slots of such parameters": self._format_folded(slots),
            f"kept {len(missing)} {MISSING}": self._format_folded(missing),
            f"ignored {len(self.ignored)} of the snapshot": self._format_folded(self.ignored),
            f"cast {len(self.cast)}": self._format_casts(),
            f"renamed {len(renames)}": format_list(renames, _MAX_SHOWN),
        }
        lines = [f"{what}: {keys}" for what, keys in others.items() if keys]
        return "\n".join([f"loaded {len(self.loaded)} values of {self.url}", *lines])

    def _format_folded(self, keys: Sequence[str]) -> str:
        return format_keys(fold_keys(keys, self.loaded)) if keys else ""

    def _format_casts(self) -> str:
        keys_by_dtypes: dict[str, list[str]] = {}
        for key, dtypes in self.cast.items():
            keys_by_dtypes.setdefault(dtypes, []).append(key)
        others = [key for key in self.loaded if key not in self.cast] if self.cast else []
        return ", ".join(
            f"{format_keys(fold_keys(keys, others), _MAX_SHOWN)} from {dtypes}"
            for dtypes, keys in keys_by_dtypes.items()
        )

    __repr__ = __str__
