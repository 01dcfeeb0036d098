"""``holdfast request-save RUN``: ask the training that writes to a run to save now."""

from __future__ import annotations

from time import sleep

import click

from holdfast.cli.console import progress_bar
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import resolve_run_allow_empty
from holdfast.cli.verbs.sweep import parse_duration
from holdfast.format.names import new_attempt
from holdfast.run.run import Run
from holdfast.run.save_request import RequestedSave, put_request, request_and_wait


@click.command("request-save", short_help="Ask a running training to save now.")
@click.argument("run")
@click.option(
    "--timeout",
    callback=parse_duration,
    default="300s",
    show_default=True,
    metavar="TIME",
    help="Give up after so long: 90 (seconds), 15m, 24h.",
)
@click.option("--no-wait", is_flag=True, help="Only ask; do not wait for the version.")
@json_option
def command(run: str, timeout: float, no_wait: bool, as_json: bool) -> None:
    """Ask the training that writes to RUN to save at its next step, and print the version.

    A request that is there already is joined. One that nobody answers in time, or that Ctrl-C
    ends, is taken back.
    """
    place = resolve_run_allow_empty(run)
    if no_wait:
        mine = new_attempt()
        version, joined = None, put_request(place.store, mine) != mine
    else:
        answer = _request_and_wait(place, timeout, quiet=as_json)
        version, joined = str(answer.version), answer.joined
    if as_json:
        print_json({"run": place.url, "version": version, "joined": joined})
    else:
        from holdfast.cli.console import make_console, styled_text

        asked = "There is a request already" if joined else "Asked to save at the next step"
        make_console().print(styled_text(version or asked), soft_wrap=True)


def _request_and_wait(run: Run, timeout: float, quiet: bool) -> RequestedSave:
    """Ask and wait; a bar counts the seconds."""
    with progress_bar("waiting for the training", round(timeout), quiet=quiet, unit="s") as advance:

        def wait(span: float) -> None:
            sleep(span)
            advance(1)

        return request_and_wait(run, timeout, wait=wait)
