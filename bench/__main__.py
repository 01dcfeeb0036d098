"""``python -m bench [--quick] [TOPIC ...] [--folder DIR]``.

With all topics, write ``build/benchmarks.md``. With some topics, replace only their sections in it.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from bench import disk, report

ON_A_DEVICE = ("device",)
"""Topics that need an accelerator. They run only when they are named."""

TOPICS = (
    "save_load", "small", "blocked", "slowdown", "memory", "million", "ranks", "journeys",
    "incremental", "step", "growth", "distributed", "s3", "s3_peers", "hdfs",
    "shared_reads", "memory_tier", "memory_resume", "local_tier", "evaluation", "tables",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument(
        "topics", nargs="*", metavar="TOPIC", help=", ".join((*TOPICS, *ON_A_DEVICE))
    )
    parser.add_argument("--only", help="comma-separated topics; write no file")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a real disk")
    parser.add_argument("--output", type=Path, help="default: build/benchmarks.md")
    chosen = parser.parse_args()
    topics = chosen.only.split(",") if chosen.only else chosen.topics or list(TOPICS)
    if unknown := set(topics) - {*TOPICS, *ON_A_DEVICE}:
        parser.error(f"unknown topic {', '.join(sorted(unknown))}; choose from {', '.join(TOPICS)}")
    mib, start = 1 << 20, time.monotonic()
    found: list[report.Section] = []
    with disk.scratch_folder(chosen.folder) as folder:
        sizes = (256 * mib, 256 * mib, 1) if chosen.quick else (2048 * mib, 1024 * mib, 3)
        options = report.Options(folder, *sizes, chosen.quick)
        for topic in topics:
            began = time.monotonic()
            for section in importlib.import_module(f"bench.{topic}").sections(options):
                print(report.render(section, markdown=False), flush=True)
                found.append(section)
            print(f"({topic}: {time.monotonic() - began:.0f} s)", flush=True)
        output = chosen.output
        there = Path(__file__).parents[1] / "build" / "benchmarks.md"
        if topics == list(TOPICS) or chosen.output:
            output = output or (None if chosen.quick else there)
            if output:
                output.parent.mkdir(exist_ok=True)
                command = " ".join(["make bench", *({*topics} & {*ON_A_DEVICE})])
                seconds, limits = time.monotonic() - start, topics == list(TOPICS)
                text = report.render_document(found, options, seconds, command, limits)
                output.write_text(text)
        elif not chosen.quick and not chosen.only and there.exists():
            there.write_text(report.splice_sections(there.read_text(), found))


if __name__ == "__main__":
    main()
