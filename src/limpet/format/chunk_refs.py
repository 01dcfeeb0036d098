"""The locations of the chunks of an incremental shard: in the shard or in earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from limpet.errors import ManifestInvalid
from limpet.format.manifest import ShardReference
from limpet.ragged import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRefs:
    """The file number and the offset in that file of each chunk.

    File 0 is the shard itself; files 1 and up are the files that the shard refers to.
    """

    files: Ints
    offsets: Ints

    def is_contiguous_with_next(self, cuts: Ints) -> npt.NDArray[np.bool_]:
        """Return, for each chunk but the last, whether the next chunk follows it in its file."""
        lengths = np.diff(cuts, prepend=0)
        contiguous: npt.NDArray[np.bool_] = (self.files[1:] == self.files[:-1]) & (
            self.offsets[1:] == (self.offsets + lengths)[:-1]
        )
        return contiguous


def expand_runs(
    runs: Sequence[tuple[int, int, int]],
    cuts: Ints,
    length: int,
    refers: Sequence[ShardReference],
    make_error: Callable[[str, object], ManifestInvalid],
) -> ChunkRefs:
    """Return the locations of all chunks, from the runs of an index.

    Raises the error that ``make_error`` returns unless all of the following hold:

    - The runs contain every chunk except the header exactly once.
    - The runs in the shard itself cover its ``length`` bytes after the header without gaps.
    - The other runs lie within their files and do not overlap.
    - The runs use as many bytes of each file as the manifest lists.
    """
    header_run = (0, 0, 0)
    first, files, offsets = np.array([header_run, *runs], np.int64).T
    valid = (
        len(first) > 1
        and first[1] == 1
        and first[-1] < len(cuts)
        and bool((np.diff(first) > 0).all())
        and files.min() >= 0
        and files.max() <= len(refers)
        and offsets.min() >= 0
        and offsets.max() < 1 << 62
    )
    if not valid:
        raise make_error(
            f"runs with chunks 1 to {len(cuts) - 1}, in order, in files 0 to {len(refers)}",
            runs[:20],
        )
    chunk_starts = np.append(0, cuts[:-1])
    starts = chunk_starts[first]
    lengths = np.diff(starts, append=cuts[-1])
    file_lengths = [length, *(r.length for r in refers)]
    _check_run_overlap(files, offsets, offsets + lengths, file_lengths, make_error)
    used = np.zeros(len(file_lengths), np.int64)
    np.add.at(used, files, lengths)
    listed = [r.bytes for r in refers]
    if used[1:].tolist() != listed:
        raise make_error(f"{listed} bytes of the files that the manifest lists", used[1:].tolist())
    counts = np.diff(first, append=len(cuts))
    return ChunkRefs(np.repeat(files, counts), chunk_starts + np.repeat(offsets - starts, counts))


def _check_run_overlap(
    files: Ints,
    offsets: Ints,
    stops: Ints,
    file_lengths: Sequence[int],
    make_error: Callable[[str, object], ManifestInvalid],
) -> None:
    """Raise unless the runs do not overlap and those in file 0 cover it without gaps."""
    order = np.lexsort((offsets, files))
    files, offsets, stops = files[order], offsets[order], stops[order]
    same_file = files[1:] == files[:-1]
    gaps = offsets[1:] - stops[:-1]
    wrong = same_file & ((gaps < 0) | ((files[1:] == 0) & (gaps != 0)))
    if wrong.any():
        i = int(wrong.argmax())
        raise make_error(
            f"runs without overlap: the next run at {stops[i]} of file {files[i]}", offsets[i + 1]
        )
    last = np.append(~same_file, True)
    ends = stops[last].tolist()
    for number, end in zip(files[last].tolist(), ends, strict=True):
        if end > file_lengths[number] or (number == 0 and end < file_lengths[0]):
            raise make_error(
                f"runs up to byte {file_lengths[number]} of file {number}",
                f"a run that ends at {end}",
            )
