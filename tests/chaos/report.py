"""Compares a disturbed training with an undisturbed one, and prints what happened."""

import numpy as np
from rich.table import Table

import limpet
from limpet.run.run import Run
from tests.chaos.row import INTERRUPTED

TOLERANCE = 1e-6
"""The largest difference of two values if the number of ranks has changed."""

Samples = dict[int, list[int]]


def executed_samples(starts):
    """Return the samples of each step, in the order of the loader, as last executed.

    Rank r of n has the samples r, r + n, r + 2n, ... of a step. A step that only some ranks of the
    last start to execute it have executed has no samples, so it equals no other step.
    """
    samples: Samples = {}
    for ranks in starts:
        parts = [{int(row[0]): row[2:] for row in ranks.steps(r)} for r in range(ranks.start.size)]
        for step in sorted(set().union(*parts)):
            found = [part[step] for part in parts if step in part]
            # the last step of a start that was killed may be on some ranks only
            whole = np.stack(found, 1).flatten().tolist() if len(found) == len(parts) else []
            samples[step] = whole
    return samples


def compare_samples(disturbed, undisturbed):
    """Return how the orders of samples differ."""
    if disturbed == undisturbed:
        return []
    steps = sorted({*disturbed} | {*undisturbed})
    wrong = [s for s in steps if disturbed.get(s) != undisturbed.get(s)]
    first = wrong[0]
    found = f"{disturbed.get(first)}, not {undisturbed.get(first)}"
    return [f"the samples of {len(wrong)} steps differ, first in step {first}: {found}"]


def compare_states(disturbed, undisturbed, tolerance):
    """Compare the newest versions of two runs, all of their values.

    ``tolerance``: 0 for equal bits. Otherwise, the random generators, of which each rank has its
    own, are left out. Return the differences, and the largest one of two numbers.
    """
    states = []
    for url in (disturbed, undisturbed):
        newest = Run(url).latest()
        if newest is None:
            return [f"{url} has no version"], 0.0
        states.append(dict(_leaves(limpet.load(newest.url), "")))
    one, other = ({k: v for k, v in s.items() if not tolerance or k[:4] != "/rng"} for s in states)
    if one.keys() != other.keys():
        return [f"the states have other keys: {sorted(one.keys() ^ other.keys())[:5]}"], 0.0
    problems, largest = [], 0.0
    for key in one:
        a, b = np.asarray(one[key]), np.asarray(other[key])
        if a.dtype != b.dtype or a.shape != b.shape:
            problems.append(f"{key}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}")
        elif a.tobytes() != b.tobytes():
            difference = (
                float(np.abs(a.astype(float) - b.astype(float)).max())
                if a.dtype.kind in "fiu"
                else 1.0
            )
            largest = max(largest, difference)
            if not difference <= tolerance or not tolerance:  # NaN is a difference, too
                problems.append(f"{key} differs by {difference:.1e}")
    return problems, largest


def _leaves(value, path):
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from _leaves(child, f"{path}/{number}")
    else:
        yield path, value


def verify_run(supervisor):
    """Return what is wrong with the versions that no event has damaged."""
    run = Run(supervisor.cluster.run)
    problems = []
    for version in run.line():
        if str(version) not in supervisor.flipped:
            report = run.open(version).verify()
            problems += [f"{version}: {p}" for p in report.problems]
    return problems


def print_rows(console, rows):
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("time", "event", "target (process id)", "codes", "lost", "restored from", "saved"):
        table.add_column(name, justify="right" if name in ("time", "lost") else "left")
    for name in ("detection", "start", "rendezvous", "restore"):
        table.add_column(f"{name}", justify="right")
    for row in rows:
        codes = " ".join(str(code) for code in row.codes)
        is_back = row.restarted and row.tier != INTERRUPTED
        restart = [f"{row.start:.1f}", f"{row.rendezvous:.2f}", f"{row.restore:.2f}"]
        table.add_row(
            f"{row.at:.1f}", row.event.kind, row.target, codes, str(row.lost),
            f"{row.tier} {row.resumed_step}" if is_back else row.tier, row.flushed,
            f"{row.detection:.2f}", *(restart if is_back else ["", "", ""]),
        )  # fmt: skip
    console.print(table)


def print_time(console, supervisor, seconds):
    """Print and return the effective training time: steps kept * usual step time / wall time."""
    durations = [
        np.diff(ranks.steps(0)[:, 1]) / 1e9 for ranks in supervisor.starts if ranks.step_count > 1
    ]
    usual = float(np.median(np.concatenate(durations)))
    starts = [(ranks.all_at("started") or ranks.began) - ranks.began for ranks in supervisor.starts]
    wall, kept = seconds - sum(starts), len(executed_samples(supervisor.starts))
    restarts = len([row for row in supervisor.rows if row.restarted])
    share = kept * usual / wall
    cost = (wall - kept * usual) / max(1, len(supervisor.rows))
    console.print(
        f"{kept} steps kept of {sum(d.size + 1 for d in durations)} executed, usually"
        f" {usual * 1e3:.0f} ms each, in {wall:.1f} s without the start of the processes"
        f" ({sum(starts):.1f} s): effective training time {share:.2f} with"
        f" {len(supervisor.rows)} events and {restarts} restarts. An event costs {cost:.2f} s on"
        f" average; with one every two minutes, that is {1 - cost / 120:.3f}."
    )
    return share
