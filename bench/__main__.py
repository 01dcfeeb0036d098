"""``python -m bench [--quick] [--only save_load,small,...] [--folder DIR]``."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from bench import disk, report

TOPICS = (
    "save_load", "small", "blocked", "slowdown", "memory", "million", "walk", "incremental", "step"
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--only", default=",".join(TOPICS), help="topics, comma-separated")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a real disk")
    parser.add_argument("--output", type=Path, help="default: docs/benchmarks.md if all topics run")
    chosen = parser.parse_args()
    topics = chosen.only.split(",")
    if unknown := set(topics) - set(TOPICS):
        parser.error(f"no topic {', '.join(sorted(unknown))}; there are {', '.join(TOPICS)}")
    mib, start = 1 << 20, time.monotonic()
    found: list[report.Section] = []
    with disk.scratch(chosen.folder) as folder:
        sizes = (256 * mib, 256 * mib, 1) if chosen.quick else (2048 * mib, 1024 * mib, 3)
        options = report.Options(folder, *sizes, chosen.quick)
        for topic in topics:
            began = time.monotonic()
            for section in importlib.import_module(f"bench.{topic}").sections(options):
                print(report.render(section, markdown=False), flush=True)
                found.append(section)
            print(f"({topic}: {time.monotonic() - began:.0f} s)", flush=True)
        output = chosen.output
        if output is None and not chosen.quick and topics == list(TOPICS):
            output = Path(__file__).parents[1] / "docs" / "benchmarks.md"
        if output:
            output.parent.mkdir(exist_ok=True)
            text = report.document(found, options, time.monotonic() - start, "make bench")
            output.write_text(text)


if __name__ == "__main__":
    main()
