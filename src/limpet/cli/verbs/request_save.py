"""``limpet request-save RUN``: request a save from the training that writes to a run."""

from __future__ import annotations

from time import sleep

import click

from limpet.cli.console import print_line, progress_bar
from limpet.cli.output import duration_option, json_option, print_json
from limpet.cli.resolve import resolve_run
from limpet.format.names import random_id
from limpet.run.save_request import put_request, request_and_wait


@click.command("request-save")
@click.argument("run")
@duration_option("--timeout", "300s", "Stop waiting after this time: 90 (seconds), 15m, 24h.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the version.")
@json_option
def command(run: str, timeout: float, no_wait: bool, as_json: bool) -> None:
    """Request a save from the training that writes to RUN, at its next step; print the version.

    If a request already exists, this command waits for the same save. If the training does not
    answer in time, or on Ctrl-C, the request is withdrawn.
    """
    opened = resolve_run(run, require_version=False)[0]
    if no_wait:
        attempt = random_id()
        version, joined = None, put_request(opened.store, attempt) != attempt
    else:
        what, seconds = "waiting for the training", round(timeout)
        with progress_bar(what, seconds, quiet=as_json, unit="s") as advance:

            def wait(seconds: float) -> None:
                sleep(seconds)
                advance(1)

            answer = request_and_wait(opened, timeout, wait=wait)
        version, joined = str(answer.version), answer.joined
    if as_json:
        print_json({"run": opened.url, "version": version, "joined": joined})
    else:
        status = "A request already exists" if joined else "Requested a save at the next step"
        print_line(version or status)
