"""Topic 7: plan and manifest for a million boxes over 1,024 simulated ranks."""

from __future__ import annotations

import time

from bench import fresh_process
from bench.report import Options, Section, judge

_REPORTED = {
    "offer of one rank": ("offer_s", 1e3, "ms"),
    "index, encoded by one rank": ("rows_encode_s", 1e3, "ms"),
    "all indexes, read and checked by one process": ("rows_s", 1, "s"),
    "read plan of one rank from all indexes": ("read_plan_s", 1, "s"),
    "memory of that": ("read_plan_mib", 1, "MiB"),
}


def measure(folder: str) -> dict[str, float]:
    """In a child: the figures of ``million_boxes`` for 1,024 ranks, and of the manifest."""
    from pathlib import Path

    from bench import million_boxes

    figures = million_boxes.measure_all((1024,), Path(folder))[0]
    return {**figures, "manifest_s": _manifest(1024)}


def _manifest(ranks: int) -> float:
    """Seconds to encode and seal a manifest that names the shards of so many ranks."""
    from bench.million_boxes import LEAVES
    from holdfast.format import names
    from holdfast.format.manifest import FileEntry, Manifest, Shard, encode_manifest

    start, attempt = time.perf_counter(), names.new_attempt()
    shards = [
        Shard(
            names.shard_name(rank, ranks, attempt),
            1 << 30,
            FileEntry(names.index_name(rank, ranks, attempt), 1 << 20, "0" * 32),
        )
        for rank in range(ranks)
    ]
    tree = {f"model/layers.{leaf}.weight": {"leaf": leaf} for leaf in range(LEAVES)}
    encode_manifest(Manifest(attempt, "now", "bench", 1, 0, None, shards, {}, tree))
    return time.perf_counter() - start


def sections(options: Options) -> list[Section]:
    title = "Plan and manifest for a million boxes over 1,024 simulated ranks"
    text = (
        "977 leaves, each cut over all ranks: 1,000,448 boxes. The coordinator decodes all offers,"
        " plans, and encodes a manifest that names all shards; its memory counts the offers too."
    )
    try:
        found = fresh_process.call("bench.million:measure", timeout=300, folder=str(options.folder))
    except fresh_process.MeasurementFailed as failure:
        targets = [
            judge("plan and manifest at the coordinator", [], most=5, unit="s"),
            judge("its memory", [], most=200, unit="MiB"),
            judge("the same, structure unchanged", [], most=0.5, unit="s"),
        ]
        return [Section(title, text, targets, missing=[f"holdfast: {failure}"])]
    verdicts = [
        judge("plan and manifest at the coordinator", [found["plan_s"] + found["manifest_s"]],
              most=5, unit="s"),
        judge("its memory", [found["plan_mib"]], most=200, unit="MiB", digits=0),
        judge("the same, structure unchanged", [found["reuse_s"] + found["manifest_s"]],
              most=0.5, unit="s", digits=3),
    ]  # fmt: skip
    for label, (name, factor, unit) in _REPORTED.items():
        verdicts.append(judge(label, [factor * found[name]], unit=unit))
    return [Section(title, text + " One run.", verdicts)]
