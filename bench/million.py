"""Topic 7: plan and manifest for a million boxes over 1,024 simulated ranks."""

from __future__ import annotations

import time

from bench import fresh_process
from bench.report import Options, Section, judge

_REPORTED = {
    "local plan of one rank": ("offer_s", 1e3, "ms"),
    "one rank encodes its index": ("rows_encode_s", 1e3, "ms"),
    "one process reads and checks all indexes": ("rows_s", 1, "s"),
    "read plan of one rank, from all indexes": ("read_plan_s", 1, "s"),
    "memory of that read plan": ("read_plan_mib", 1, "MiB"),
}


def measure(folder: str) -> dict[str, float]:
    """Return the figures of ``million_boxes`` for 1,024 ranks, and the time of the manifest.

    Runs in a child process.
    """
    from pathlib import Path

    from bench import million_boxes

    figures = million_boxes.measure_all((1024,), Path(folder))[0]
    return {**figures, "manifest_s": _manifest(1024)}


def _manifest(ranks: int) -> float:
    """Return the seconds to encode and seal a manifest with the shards of ``ranks`` ranks."""
    from bench.million_boxes import LEAVES
    from limpet.format import names
    from limpet.format.manifest import FileEntry, Manifest, Shard
    from limpet.format.sealed import seal

    start, attempt = time.perf_counter(), names.random_id()
    shards = [
        Shard(
            names.shard_name(rank, ranks, attempt),
            1 << 30,
            FileEntry(names.index_name(rank, ranks, attempt), 1 << 20, "0" * 32),
            [],
        )
        for rank in range(ranks)
    ]
    tree = {f"model/layers.{leaf}.weight": {"leaf": leaf} for leaf in range(LEAVES)}
    seal(Manifest(attempt, "now", "bench", 1, 0, None, 0, shards, {}, tree))
    return time.perf_counter() - start


def sections(options: Options) -> list[Section]:
    title = "Plan and manifest for a million boxes over 1,024 simulated ranks"
    text = (
        "977 leaves, each split across all ranks: 1,000,448 boxes. The coordinator decodes all"
        " local plans, makes the global plan, and encodes a manifest that names all shards. Its"
        " memory includes the local plans."
    )
    try:
        found = fresh_process.call("bench.million:measure", timeout=300, folder=str(options.folder))
    except fresh_process.MeasurementFailed as failure:
        targets = [
            judge("plan and manifest at the coordinator", [], most=5, unit="s"),
            judge("memory of the coordinator", [], most=200, unit="MiB"),
            judge("the same with an unchanged structure", [], most=0.5, unit="s"),
        ]
        return [Section(title, text, targets, missing=[f"limpet: {failure}"])]
    verdicts = [
        judge("plan and manifest at the coordinator", [found["plan_s"] + found["manifest_s"]],
              most=5, unit="s"),
        judge("memory of the coordinator", [found["plan_mib"]], most=200, unit="MiB", digits=0),
        judge("the same with an unchanged structure", [found["reuse_s"] + found["manifest_s"]],
              most=0.5, unit="s", digits=3),
    ]  # fmt: skip
    for label, (name, factor, unit) in _REPORTED.items():
        verdicts.append(judge(label, [factor * found[name]], unit=unit))
    return [Section(title, text + " One run.", verdicts)]
