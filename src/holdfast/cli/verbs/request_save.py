"""``holdfast request-save RUN``: ask the training that writes to a run to save now."""

from __future__ import annotations

from time import sleep

import click

from holdfast.cli.console import progress
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import started_at
from holdfast.cli.verbs.sweep import seconds
from holdfast.format.names import new_attempt
from holdfast.run.run import Run
from holdfast.run.save_request import Answer, ask, put_request


@click.command("request-save", short_help="Ask a running training to save now.")
@click.argument("run")
@click.option(
    "--timeout",
    callback=seconds,
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
    place = started_at(run)
    if no_wait:
        mine = new_attempt()
        version, joined = None, put_request(place.store, mine) != mine
    else:
        answer = _wait(place, timeout, quiet=as_json)
        version, joined = str(answer.version), answer.joined
    if as_json:
        print_json({"run": place.url, "version": version, "joined": joined})
    else:
        from holdfast.cli.console import console, text

        asked = "There is a request already" if joined else "Asked to save at the next step"
        console().print(text(version or asked), soft_wrap=True)


def _wait(place: Run, timeout: float, quiet: bool) -> Answer:
    """Ask and wait; a bar counts the seconds."""
    with progress("waiting for the training", round(timeout), quiet=quiet, unit="s") as advance:

        def wait(span: float) -> None:
            sleep(span)
            advance(1)

        return ask(place, timeout, wait=wait)
