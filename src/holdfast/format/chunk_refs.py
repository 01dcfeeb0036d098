"""Where the chunks of an incremental shard lie: in the shard, or in files of earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import ManifestInvalid
from holdfast.format.manifest import Referred
from holdfast.ragged import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """For each chunk the number of its file (0: the shard itself, from 1 on: the files that it
    refers to), and its offset in that file."""

    file: Ints
    at: Ints

    def joined(self, cuts: Ints) -> npt.NDArray[np.bool_]:
        """For each chunk but the last, whether the next one follows it in the same file."""
        lengths = np.diff(cuts, prepend=0)
        same: npt.NDArray[np.bool_] = self.file[1:] == self.file[:-1]
        follows: npt.NDArray[np.bool_] = self.at[1:] == (self.at + lengths)[:-1]
        return same & follows


def places_of(
    runs: Sequence[tuple[int, int, int]],
    cuts: Ints,
    length: int,
    refers: Sequence[Referred],
    broken: Callable[[str, object], ManifestInvalid],
) -> Places:
    """The places of all chunks, from the runs of an index.

    Raises what ``broken`` makes unless the runs name every chunk but the header once, the shard's
    own ones tile its ``length`` bytes behind the header, and the others lie within their files,
    none on another, of every file as many bytes as the manifest says.
    """
    try:
        table = np.array(runs, np.int64).reshape(-1, 3)
    except OverflowError as e:
        raise broken("numbers of 64 bits", str(e)) from e
    first, file, at = table.T
    sound = (
        len(first) > 0
        and first[0] == 1
        and first[-1] < len(cuts)
        and bool((np.diff(first) > 0).all())
        and file.min() >= 0
        and file.max() <= len(refers)
        and at.min() >= 0
        and at.max() < 1 << 62
    )
    if not sound:
        raise broken(
            f"runs of chunks 1 to {len(cuts) - 1}, in order, in files 0 to {len(refers)}", runs[:20]
        )
    starts = cuts[first - 1]
    stops = np.append(starts[1:], cuts[-1])
    _check_files(file, at, stops - starts, [length, *(r.length for r in refers)], cuts[0], broken)
    used = np.zeros(len(refers) + 1, np.int64)
    np.add.at(used, file, stops - starts)
    told = [r.bytes for r in refers]
    if used[1:].tolist() != told:
        raise broken(f"{told} bytes of the files that the manifest lists", used[1:].tolist())
    counts = np.append(first[1:], len(cuts)) - first
    shift = np.repeat(at - starts, counts)
    return Places(
        np.concatenate([[0], np.repeat(file, counts)]),
        np.concatenate([[0], cuts[:-1] + shift]),
    )


def _check_files(
    file: Ints,
    at: Ints,
    lengths: Ints,
    limits: Sequence[int],
    header: int,
    broken: Callable[[str, object], ManifestInvalid],
) -> None:
    """Raise unless no two runs share a byte, and those of file 0 tile it behind its header."""
    file = np.concatenate([[0], file])
    at = np.concatenate([[0], at])
    stop = at + np.concatenate([[header], lengths])
    order = np.lexsort((at, file))
    file, at, stop = file[order], at[order], stop[order]
    same = file[1:] == file[:-1]
    gap = at[1:] - stop[:-1]
    wrong = same & ((gap < 0) | ((file[1:] == 0) & (gap != 0)))
    if wrong.any():
        i = int(wrong.argmax())
        raise broken(f"runs that touch no other: one at {stop[i]} of file {file[i]}", at[i + 1])
    last = np.append(~same, True)
    ends = stop[last].tolist()
    for number, end in zip(file[last].tolist(), ends, strict=True):
        if end > limits[number] or (number == 0 and end < limits[0]):
            raise broken(f"runs up to {limits[number]} bytes of file {number}", f"one to {end}")
