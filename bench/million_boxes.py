"""A million boxes: the cost of planning a save with many ranks, and of its index files.

Every leaf is sharded across all ranks, so each rank holds one box of each of 977 leaves: 1,000,448
boxes on 1,024 ranks. No process group is started. The parts of the ranks are made one after the
other. The part of the coordinator runs in its own process, whose memory is measured. No snapshot
is written.

    python bench/million_boxes.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from limpet.format.index import (
    Index,
    IndexBox,
    IndexLeaf,
    SchemaCache,
    ShardIndex,
    decode_index,
    encode_index,
)
from limpet.layout.global_plan import can_reuse_plan, make_global_plan
from limpet.layout.local_plan import LocalPlan, make_local_plan
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.layout.shard_layout import LeafBox, chunk_cuts, digest_leaf_boxes, file_order
from limpet.types import MIB, Box

LEAVES = 977
RANKS = (8, 64, 256, 1024)
ROWS, WIDTH = 16, 4096


class IndexColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The index as columns: the ``offsets`` and ``sizes`` of all boxes, concatenated."""

    format: int
    shard: str
    length: int
    header: int
    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    leaf: list[int]
    offsets: list[int]
    sizes: list[int]
    at: list[int]
    cuts: list[int]
    digests: list[str]


def make_leaf_boxes(rank: int, ranks: int, leaves: int = LEAVES) -> list[LeafBox]:
    """Return one box of each of ``leaves`` leaves.

    Two thirds are rows of bfloat16 matrices, 128 KiB each. One third are parts of vectors.
    """
    held = []
    for i in range(leaves):
        key = f"model/layers.{i // 12}.block.{i % 12}.weight"
        if i % 3:
            shape, box = (ranks * ROWS, WIDTH), Box((rank * ROWS, 0), (ROWS, WIDTH))
        else:
            shape, box = (ranks * 64,), Box((rank * 64,), (64,))
        held.append(LeafBox(key, "bfloat16", shape, box))
    return held


def make_index(rank: int, ranks: int) -> Index:
    """Return the index that the rank writes."""
    held = make_leaf_boxes(rank, ranks)
    held = [held[i] for i in file_order(held)]
    lengths = np.array([h.nbytes for h in held])
    header = 128 * 1024
    cuts = chunk_cuts(header, lengths)
    at = (header + np.cumsum(lengths) - lengths).tolist()
    leaves = [
        IndexLeaf(h.key, h.dtype, h.shape, [IndexBox(h.box.offsets, h.box.sizes, a)])
        for h, a in zip(held, at, strict=True)
    ]
    name = f"shard-{rank:05}-of-{ranks:05}.0123456789ab.safetensors"
    digests = [f"{rank * 100_003 + i:032x}" for i in range(len(cuts))]
    return Index(1, name, int(cuts[-1]), header, leaves, cuts.tolist(), digests, [])


def make_columns(row_index: Index) -> IndexColumns:
    boxes = [(i, b) for i, leaf in enumerate(row_index.leaves) for b in leaf.boxes]
    return IndexColumns(
        row_index.limpet,
        row_index.shard,
        row_index.length,
        row_index.header,
        [leaf.key for leaf in row_index.leaves],
        [leaf.dtype for leaf in row_index.leaves],
        [leaf.shape for leaf in row_index.leaves],
        [i for i, _ in boxes],
        [o for _, b in boxes for o in b.offsets],
        [s for _, b in boxes for s in b.sizes],
        [b.at for _, b in boxes],
        row_index.cuts,
        row_index.digests,
    )


def decode_columns(raw: bytes) -> tuple[Any, ...]:
    """Return the columns as arrays, checked by the rules of ``decode_index`` without a loop."""
    c = msgspec.json.decode(raw, type=IndexColumns)
    leaf, at = np.array(c.leaf), np.array(c.at)
    offsets, sizes, cuts = np.array(c.offsets), np.array(c.sizes), np.array(c.cuts)
    dims = np.array([len(s) for s in c.shapes])
    limit = np.array([n for i in c.leaf for n in c.shapes[i]])
    if (offsets < 0).any() or (sizes < 0).any() or (offsets + sizes > limit).any():
        raise ValueError("a box is outside its leaf")
    starts = np.cumsum(dims[leaf]) - dims[leaf]
    nbytes = np.multiply.reduceat(sizes, starts) * 2
    order = np.argsort(at)
    if (at[order][1:] != (at + nbytes)[order][:-1]).any() or (np.diff(cuts, prepend=0) <= 0).any():
        raise ValueError("boxes or chunks leave gaps")
    if len(c.digests) != len(cuts) or not all(len(d) == 32 for d in c.digests):
        raise ValueError("invalid digests")
    return c.keys, c.dtypes, c.shapes, leaf, offsets, sizes, at, cuts


def time_best(call: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
    """Return the seconds of the fastest of ``times`` calls, and the last result."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - begin)
    return best, result


def process_memory(field: str) -> float:
    """Return the MiB of this process: ``VmRSS`` is current, ``VmHWM`` is the peak (Linux).

    ``ru_maxrss`` is unsuitable, because it starts with the value of the parent process.
    """
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


def measure_coordinator(ranks: int, folder: Path) -> dict[str, float]:
    """Make the global plan from the local plans in the folder. Memory includes the local plans."""
    make_global_plan([make_local_plan(make_leaf_boxes(0, 1))])
    before = process_memory("VmRSS")
    raw = [path.read_bytes() for path in sorted(folder.glob("*.offer"))]
    took, plan = time_best(lambda: make_global_plan([LocalPlan.from_bytes(r) for r in raw]))
    used = process_memory("VmHWM") - before
    if plan.write_flags.sum() != ranks * LEAVES:
        raise SystemExit("the plan is wrong")
    again, same = time_best(lambda: can_reuse_plan([r[:16] for r in raw], plan))
    if not same:
        raise SystemExit("an unchanged structure was not recognized")
    return {"plan_s": took, "plan_mib": used, "reuse_s": again}


def measure_reader(ranks: int, folder: Path, case: str) -> dict[str, float]:
    """Decode and check all indexes in the folder, one by one, keeping what ``shape`` keeps."""
    decode_index(encode_index(make_index(0, 1)), "warm")
    before = process_memory("VmRSS")
    paths = sorted(folder.glob("*.rows" if case != "columns" else "*.columns"))
    alike = SchemaCache()

    def indexes() -> Iterator[ShardIndex]:
        for path in paths:
            yield decode_index(path.read_bytes(), path.name, schema_cache=alike)

    if case == "read_plan":  # as on a rank of a load into half as many ranks
        wanted = [
            ReadRequest(h.key, Box((0, *h.box.offsets[1:]), (2 * h.box.sizes[0], *h.box.sizes[1:])))
            for h in make_leaf_boxes(0, ranks)
        ]
        took, plan = time_best(lambda: make_read_plan(indexes(), wanted))
        if len({i.shard for i in plan.items}) != 2:
            raise SystemExit("the read plan is wrong")
    elif case == "columns":
        took, _ = time_best(lambda: [decode_columns(path.read_bytes())[3:] for path in paths])
    else:
        took, _ = time_best(lambda: list(indexes()))
    return {f"{case}_s": took, f"{case}_mib": process_memory("VmHWM") - before}


def _run_in_process(*arguments: object) -> dict[str, float]:
    """Run one part of the simulation in a fresh process, so that its memory is measured alone."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], check=True, stdout=subprocess.PIPE
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure_all(
    counts: tuple[int, ...] = RANKS, folder: Path | None = None
) -> list[dict[str, float]]:
    """Return one dict of figures per number of ranks: seconds, bytes, and resident MiB."""
    figures = []
    for ranks in counts:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            place = Path(made)
            held = make_leaf_boxes(0, ranks)
            offer_s, offer = time_best(lambda h=held: make_local_plan(h), 5)
            structure_s, _ = time_best(lambda h=held: digest_leaf_boxes(h), 5)
            made_rows = make_index(0, ranks)
            encode_s, raw = time_best(lambda i=made_rows: encode_index(i), 5)
            made_columns = make_columns(made_rows)
            columns_s, raw_columns = time_best(lambda c=made_columns: msgspec.json.encode(c), 5)
            for r in range(ranks):
                (place / f"{r:05}.offer").write_bytes(
                    make_local_plan(make_leaf_boxes(r, ranks)).to_bytes()
                )
                one = make_index(r, ranks)
                (place / f"{r:05}.rows").write_bytes(encode_index(one))
                (place / f"{r:05}.columns").write_bytes(msgspec.json.encode(make_columns(one)))
            figures.append(
                {
                    "ranks": ranks,
                    "boxes": ranks * LEAVES,
                    "offer_s": offer_s,
                    "structure_s": structure_s,
                    "offers_bytes": ranks * len(offer.to_bytes()),
                    "rows_bytes": ranks * len(raw),
                    "rows_encode_s": encode_s,
                    "columns_bytes": ranks * len(raw_columns),
                    "columns_encode_s": columns_s,
                    **_run_in_process("coordinator", ranks, place),
                    **_run_in_process("rows", ranks, place),
                    **_run_in_process("columns", ranks, place),
                    **_run_in_process("read_plan", ranks, place),
                }
            )
    return figures


def render_table(figures: list[dict[str, float]]) -> str:
    """Return the figures as a Markdown table."""
    lines: list[tuple[str, Callable[[dict[str, float]], str]]] = [
        ("boxes", lambda f: f"{f['boxes']:,}"),
        ("local plan of one rank, ms", lambda f: f"{1e3 * f['offer_s']:.2f}"),
        ("its structure digest only, ms", lambda f: f"{1e3 * f['structure_s']:.2f}"),
        ("local plans of all ranks, MiB", lambda f: f"{f['offers_bytes'] / MIB:.1f}"),
        ("global plan at the coordinator, s", lambda f: f"{f['plan_s']:.3f}"),
        ("its memory, with the local plans, MiB", lambda f: f"{f['plan_mib']:.0f}"),
        ("unchanged structure, ms", lambda f: f"{1e3 * f['reuse_s']:.2f}"),
        ("encode one index, ms (rows / columns)", _row_and_column("encode_s", 1e3, ".2f")),
        ("indexes, MiB (rows / columns)", _row_and_column("bytes", 1 / MIB, ".1f")),
        ("read, check all indexes, s (rows / columns)", _row_and_column("s", 1, ".2f")),
        ("memory for that, MiB (rows / columns)", _row_and_column("mib", 1, ".0f")),
        ("read plan of one rank, from all indexes, s", lambda f: f"{f['read_plan_s']:.2f}"),
        ("its memory, MiB", lambda f: f"{f['read_plan_mib']:.0f}"),
    ]
    head = "| ranks | " + " | ".join(f"{f['ranks']:,}" for f in figures) + " |"
    body = [f"| {name} | " + " | ".join(map(show, figures)) + " |" for name, show in lines]
    return "\n".join([head, "|---|" + "---:|" * len(figures), *body])


def _row_and_column(
    figure: str, factor: float, format_spec: str
) -> Callable[[dict[str, float]], str]:
    def show(f: dict[str, float]) -> str:
        return " / ".join(
            format(factor * f[f"{k}_{figure}"], format_spec) for k in ("rows", "columns")
        )

    return show


def main(arguments: list[str]) -> None:
    if not arguments:
        print(render_table(measure_all()))
    elif arguments[0] == "coordinator":
        print(json.dumps(measure_coordinator(int(arguments[1]), Path(arguments[2]))))
    else:
        print(json.dumps(measure_reader(int(arguments[1]), Path(arguments[2]), arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
