"""Where the chunks of an incremental shard lie: in the shard, or in files of earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import ManifestInvalid
from holdfast.format.manifest import ShardReference
from holdfast.ragged import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRefs:
    """For each chunk the number of its file (0: the shard itself, from 1 on: the files that it
    refers to), and its offset in that file."""

    files: Ints
    offsets: Ints

    def is_contiguous_with_next(self, cuts: Ints) -> npt.NDArray[np.bool_]:
        """For each chunk but the last, whether the next one follows it in the same file."""
        lengths = np.diff(cuts, prepend=0)
        same: npt.NDArray[np.bool_] = self.files[1:] == self.files[:-1]
        follows: npt.NDArray[np.bool_] = self.offsets[1:] == (self.offsets + lengths)[:-1]
        return same & follows


def expand_runs(
    runs: Sequence[tuple[int, int, int]],
    cuts: Ints,
    length: int,
    refers: Sequence[ShardReference],
    make_error: Callable[[str, object], ManifestInvalid],
) -> ChunkRefs:
    """The places of all chunks, from the runs of an index.

    Raises what ``broken`` makes unless the runs name every chunk but the header once, the shard's
    own ones tile its ``length`` bytes behind the header, and the others lie within their files,
    none on another, of every file as many bytes as the manifest says.
    """
    try:
        table = np.array(runs, np.int64).reshape(-1, 3)
    except OverflowError as e:
        raise make_error("numbers of 64 bits", str(e)) from e
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
        raise make_error(
            f"runs of chunks 1 to {len(cuts) - 1}, in order, in files 0 to {len(refers)}", runs[:20]
        )
    starts = cuts[first - 1]
    stops = np.append(starts[1:], cuts[-1])
    _check_run_overlap(
        file, at, stops - starts, [length, *(r.length for r in refers)], cuts[0], make_error
    )
    used = np.zeros(len(refers) + 1, np.int64)
    np.add.at(used, file, stops - starts)
    told = [r.bytes for r in refers]
    if used[1:].tolist() != told:
        raise make_error(f"{told} bytes of the files that the manifest lists", used[1:].tolist())
    counts = np.append(first[1:], len(cuts)) - first
    shift = np.repeat(at - starts, counts)
    return ChunkRefs(
        np.concatenate([[0], np.repeat(file, counts)]),
        np.concatenate([[0], cuts[:-1] + shift]),
    )


def _check_run_overlap(
    files: Ints,
    offsets: Ints,
    lengths: Ints,
    file_lengths: Sequence[int],
    header_length: int,
    make_error: Callable[[str, object], ManifestInvalid],
) -> None:
    """Raise unless no two runs share a byte, and those of file 0 tile it behind its header."""
    files = np.concatenate([[0], files])
    offsets = np.concatenate([[0], offsets])
    stop = offsets + np.concatenate([[header_length], lengths])
    order = np.lexsort((offsets, files))
    files, offsets, stop = files[order], offsets[order], stop[order]
    same = files[1:] == files[:-1]
    gap = offsets[1:] - stop[:-1]
    wrong = same & ((gap < 0) | ((files[1:] == 0) & (gap != 0)))
    if wrong.any():
        i = int(wrong.argmax())
        raise make_error(
            f"runs that touch no other: one at {stop[i]} of file {files[i]}", offsets[i + 1]
        )
    last = np.append(~same, True)
    ends = stop[last].tolist()
    for number, end in zip(files[last].tolist(), ends, strict=True):
        if end > file_lengths[number] or (number == 0 and end < file_lengths[0]):
            raise make_error(
                f"runs up to {file_lengths[number]} bytes of file {number}", f"one to {end}"
            )
