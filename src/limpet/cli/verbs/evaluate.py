"""``limpet evaluate RUN``: evaluate the versions of a run with several worker processes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from limpet import events
from limpet.cli.console import print_line, progress_bar
from limpet.cli.exit_codes import EVALUATION_FAILED
from limpet.cli.output import duration_option, json_option, keys_option, print_json
from limpet.cli.resolve import check_run_target, refuse_address, resolve_run
from limpet.convert.export import SUFFIXES
from limpet.convert.export_record import find_record
from limpet.evaluation.evaluation import Evaluation, Outcome
from limpet.evaluation.options import Selection, Workers
from limpet.evaluation.worker import work_at
from limpet.format.names import Version, parse_version
from limpet.loading.snapshot import reader_of
from limpet.run.policy import Mode
from limpet.run.run import Run
from limpet.settings import evaluation_secret
from limpet.snapshot import pins
from limpet.snapshot.location import is_snapshot, locate
from limpet.tables.export import prepare
from limpet.tasks.remote import format_address
from limpet.text import format_list, to_printable
from limpet.threads import no_op


@click.command("evaluate")
@click.argument("run", required=False)
@click.option(
    "--with",
    "module",
    metavar="MODULE",
    help="The module with the functions setup(snapshot) and evaluate(model, batch).",
)
@click.option(
    "--data", metavar="MODULE:FUNCTION", help="The function that returns a map-style dataset."
)
@click.option("--name", default="evaluation", show_default=True, help="Names the evaluation.")
@click.option("--metric", metavar="NAME", help="The metric by which versions are compared.")
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether less or more is better.")
@click.option(
    "--export-best",
    "export_to",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Export each version that becomes the best by --metric to DIR/step_N.",
)
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(SUFFIXES)),
    help="The format of --export-best, as of export. Default: hf.",
)
@click.option("--workers", default=4, show_default=True, help="0: in this process.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="What runs the workers: processes here, or actors on a Ray cluster.",
)
@click.option("--batch-size", default=32, show_default=True, help="0: a record is a batch.")
@keys_option
@click.option("--device", help="Where to load the leaves that --keys selects.")
@click.option("--follow", is_flag=True, help="Evaluate new versions until the training ends.")
@click.option("--all", "skip_none", is_flag=True, help="Skip no version; the oldest first.")
@click.option("--retry", is_flag=True, help="Also evaluate versions that failed before.")
@click.option("--every-steps", type=int, metavar="N", help="Only the first version after N steps.")
@duration_option(
    "--every-seconds", "0", "Start at most one evaluation in this time: 90 (seconds), 15m, 1h."
)
@duration_option("--throttle", "0", "Wait for this time after each evaluation.")
@duration_option("--task-time", "10m", "Replace a worker that needs longer for a part of the data.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Let workers of other machines connect here. With --workers 0, only they work.",
)
@click.option(
    "--connect",
    metavar="HOST:PORT",
    help="Be a worker of the evaluation that listens there. No RUN, and no other options.",
)
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False),
    help="Has the secret for --listen and --connect. Without it, LIMPET_SECRET is the secret.",
)
@json_option
@click.pass_context
def command(  # noqa: PLR0913  (one parameter for each option)
    ctx: click.Context,
    /,
    *,
    run: str | None,
    module: str | None,
    data: str | None,
    name: str,
    metric: str | None,
    mode: Mode | None,
    export_to: str | None,
    kind: str | None,
    workers: int,
    engine: Literal["local", "ray"],
    batch_size: int,
    keys: Sequence[str],
    device: str | None,
    follow: bool,
    task_time: float,
    listen: str | None,
    connect: str | None,
    secret_file: str | None,
    as_json: bool,
    **selection: Any,
) -> None:
    """Evaluate versions of RUN and record their metrics, from which RUN@best follows.

    Several processes share the data of each version. Without --follow and --all, only the newest
    version is evaluated. With --keys, setup gets a dict of these leaves instead of the snapshot.
    """
    sys.path.insert(0, os.getcwd())  # as python -m does
    if connect is not None:
        _work(ctx, connect, secret_file)
        return
    if run is None or module is None or data is None:
        raise click.UsageError("RUN, --with, and --data are required, except with --connect", ctx)
    objective = _make_objective(ctx, metric, mode, export_to, kind)
    check_run_target(Run(run)) if follow else resolve_run(run)  # it need not exist yet
    address = None if listen is None else _make_address(ctx, listen, secret_file)
    evaluation = Evaluation(
        run,
        f"{module}:setup",
        f"{module}:evaluate",
        data=data,
        name=name,
        objective=objective,
        workers=Workers(workers, {} if engine == "ray" else None, address, task=task_time),
        batch_size=batch_size or None,
        keys=keys,
        device=device,
        follow=follow,
        select=Selection(**selection),
    )
    say: Callable[..., object] = no_op if as_json else print_line
    exported: dict[str, str] = {}
    export = partial(_export_best, Run(run), objective, export_to, kind or "hf", exported, [], say)
    with nullcontext() if as_json else _printed_events():
        export()  # what an earlier command has left
        outcomes = evaluation.run(partial(_show, say, export))
    if as_json:
        document = {"run": evaluation.url, "name": name, "exported": exported}
        print_json({**document, "versions": [*map(_to_json, outcomes)]})
    elif not outcomes:
        print_line(_describe_nothing(name, evaluation.failed))
    if evaluation.failed or any(outcome.state == "FAILED" for outcome in outcomes):
        ctx.exit(EVALUATION_FAILED)  # also if a restarted command has nothing left to evaluate


def _make_objective(
    ctx: click.Context, metric: str | None, mode: Mode | None, export_to: str | None, to: str | None
) -> tuple[str, Mode] | None:
    if (metric is None) != (mode is None):
        raise click.UsageError("--metric and --mode belong together", ctx)
    if (export_to, to) != (None, None) and not (export_to and metric):
        needs = "--export-best needs --metric and --mode, and --to needs --export-best"
        raise click.UsageError(needs, ctx)
    refuse_address(export_to or "")
    if export_to and is_snapshot(locate(export_to)):
        raise click.UsageError(f"{export_to} is a snapshot or broken: name another folder", ctx)
    return None if metric is None or mode is None else (metric, mode)


def _export_best(
    run: Run,
    objective: tuple[str, Mode] | None,
    folder: str | None,
    kind: str,
    exported: dict[str, str],
    values: list[float],
    say: Callable[..., object],
) -> None:
    """Export the best version into its own folder below ``folder``, unless it or a better one was
    exported. The folder has another name than a version: what is in ``folder`` is no run."""
    best = run.best(*objective) if objective and folder else None
    if best is None or objective is None or folder is None or str(best.version) in exported:
        return
    value = run.metrics(best)[objective[0]]
    if values and (value > min(values) if objective[1] == "min" else value < max(values)):
        return  # that one was deleted from the run
    values.append(value)
    to = f"{folder.rstrip('/')}/step_{best.version.name}"
    with pins.protected(run.location(best.version), best.version):
        prepared = prepare(reader_of(best), to, kind)
        if find_record(prepared.location, prepared.record_name) is None:  # it is written last
            with progress_bar("exporting", prepared.nbytes, quiet=say is no_op) as advance:
                prepared.write(advance)
            say(f"exported {best.version} to {to}")
    exported[str(best.version)] = to


def _work(ctx: click.Context, place: str, secret_file: str | None) -> None:
    """Work for the evaluation that listens at HOST:PORT, which knows all other options."""
    source = ctx.get_parameter_source
    given = {name for name in ctx.params if source(name) is ParameterSource.COMMANDLINE}
    if given - {"connect", "secret_file"}:
        raise click.UsageError(
            "--connect takes no other option than --secret-file, and no RUN", ctx
        )
    work_at(_make_address(ctx, place, secret_file), _print_note)


def _make_address(ctx: click.Context, place: str, secret_file: str | None) -> str:
    """Return the address at HOST:PORT. Other users could see a secret on the command line."""
    secret = Path(secret_file).read_text().strip() if secret_file else evaluation_secret()
    if not secret:
        raise click.UsageError(
            "a secret is required: write one into a file (openssl rand -hex 32) for --secret-file,"
            " or set LIMPET_SECRET",
            ctx,
        )
    parts = re.fullmatch(r"\[?([^\[\]\s]+?)\]?:(\d{1,5})", place)
    if parts is None:
        raise click.UsageError(f"{place!r} is not HOST:PORT", ctx)
    return format_address(parts[1], int(parts[2]), secret)


def _show(say: Callable[..., object], export: Callable[[], object], outcome: Outcome) -> None:
    """Print an outcome, and export the version if it is the best one now."""
    metrics = "  ".join(f"{name} {value:.6g}" for name, value in outcome.metrics.items())
    style = {"FAILED": "red", "SKIPPED": "dim"}.get(outcome.state, "")
    text = metrics if outcome.state == "DONE" else f"{outcome.state}: {outcome.cause}"
    say(f"{outcome.version}  {text}  ({outcome.seconds:.1f} s)", style)
    if outcome.state == "DONE":
        export()


@contextmanager
def _printed_events() -> Iterator[None]:
    """Print to stderr what the evaluation waits for, and on a terminal also what it evaluates."""

    def show(name: str, fields: dict[str, Any]) -> None:
        if name == "evaluation_waits":
            _print_note(f"waiting for a new version of {fields['run']} (Ctrl-C stops it)")
        elif name == "evaluation_listens":
            _print_note(f"workers can connect to {fields['address']}")
        elif name == "skipped" and parse_version(fields["version"]) is None:  # that has an outcome
            _print_note(f"skipped {fields['version']}: {fields['error'].brief}")
        elif name == "evaluation_started" and sys.stderr.isatty():
            _print_note(f"evaluating {fields['url']}")

    with events.attach(show):
        yield


def _print_note(text: str) -> None:
    click.echo(f"limpet: {to_printable(text)}", err=True)


def _describe_nothing(name: str, failed: Sequence[Version]) -> str:
    """Return why nothing was evaluated. A failure is not tried again by itself."""
    text = f"Nothing to evaluate: {name} has a record of each selected version"
    if not failed:
        return f"{text} (another --name evaluates them again)"
    return f"{text}; it failed on {format_list(failed, 5)} (--retry evaluates what failed again)"


def _to_json(outcome: Outcome) -> dict[str, Any]:
    version = outcome.version
    return {**asdict(outcome), "version": str(version), "step": version.step}
