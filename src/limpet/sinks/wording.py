"""Events as text."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from numbers import Real
from typing import Any

from limpet.errors import LimpetError
from limpet.format.names import parse_version
from limpet.text import (
    describe_newest,
    format_duration,
    format_list,
    format_metrics,
    format_size,
    format_value,
    to_json_value,
    to_printable,
    truncate,
)

_LESS = "fewer_copies", "uncopied", "metric_missing", "metrics_unwritten", "restarts_uncounted"
"""Events that say what a training does or saves less of than one may expect."""

STYLES = {
    "saved": "green",
    "config_changed": "cyan",
    **dict.fromkeys(("save_waited", "platform_detected", "deleted"), "dim"),
    **dict.fromkeys(
        ("began", "loaded", "resumed", "resume_checked", "stopped", "finished", "taken_over"),
        "cyan",
    ),
    **dict.fromkeys(
        (
            *("resume_differs", "options_replaced", "skipped", "left_unsaved"),
            *("pin_left", "read_again", "waiting", *_LESS),
            *("request_unseen", "read_alone", "not_agreed", "savepoint_failed"),
            *("training_evaluated", "ranks_awaited", "notice", "notice_source_failed", "preempted"),
            *("worker_lost", "server_lost", "buckets_returned"),
        ),
        "yellow",
    ),
    "save_failed": "bold red",
}
"""The events for people, with the style of their line: yellow if attention is needed."""

_MAX_METRICS = 4
_MAX_KEYS = 5


def number_field(fields: Mapping[str, Any], name: str) -> float | None:
    """Return a field that is a number of bytes or seconds, or None if it is missing or invalid."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) and number >= 0 else None


def bytes_per_second(fields: Mapping[str, Any]) -> float | None:
    """Return the bytes per second that the background part of a ``saved`` event wrote."""
    nbytes, seconds = number_field(fields, "bytes"), number_field(fields, "seconds")
    return nbytes / seconds if nbytes and seconds else None


def text_field(fields: Mapping[str, Any], name: str, missing: str = "?") -> str:
    """Return a field as one line of printable text."""
    return to_printable(to_json_value(fields.get(name, missing)))


def describe_saved(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that describe a ``saved`` event. Unknown values are empty."""
    nbytes, seconds = number_field(fields, "bytes"), number_field(fields, "seconds")
    blocked, referred = number_field(fields, "blocked"), number_field(fields, "referred")
    speed, reason = bytes_per_second(fields), text_field(fields, "reason", "cadence")
    return {
        "step": text_field(fields, "step"),
        "size": "" if nbytes is None else format_size(nbytes),
        "seconds": "" if seconds is None else format_duration(seconds),
        "rate": "" if speed is None else f"{format_size(speed)}/s",
        "blocked": "" if blocked is None else format_duration(blocked),
        "referred": f"+ {format_size(referred)} referred" if referred else "",
        "reason": "" if reason == "cadence" else reason,
        "metrics": format_metrics(fields.get("metrics"), _MAX_METRICS),
    }


def describe_event(name: str, fields: Mapping[str, Any]) -> str | None:
    """Return an event as one line that begins with a verb, or None if it is not for people."""
    step, version, error = (text_field(fields, name) for name in ("step", "version", "error"))
    if name == "saved":
        texts = describe_saved(fields)
        details = [" in ".join(filter(None, (texts["size"], texts["seconds"]))), texts["rate"]]
        details += [f"blocked {texts['blocked']}"] if texts["blocked"] else []
        details += [texts["referred"], texts["reason"], texts["metrics"]]
        return ": ".join(filter(None, (f"saved step {step}", ", ".join(filter(None, details)))))
    if name == "resumed":
        return _describe_resume(fields)
    if name == "loaded":  # for people only if something was kept, ignored, or converted
        return "; ".join(map(to_printable, str(fields.get("summary") or "").splitlines())) or None
    seconds = number_field(fields, "seconds")
    waited = "waited" if seconds is None else f"waited {format_duration(seconds)}"
    if name == "save_waited":
        return f"{waited} to save step {step}: another save was in progress"
    if name == "ranks_awaited":
        return f"{waited} for {_describe_late(fields)}"
    if name == "waiting":
        end = "" if seconds is None else f" for up to {format_duration(seconds)}"
        action, store = text_field(fields, "action"), text_field(fields, "store")
        return f"waiting{end} to {action} in {store}: {_error_without_todo(fields)}"
    if name == "stopped":
        best, metric = fields.get("best"), text_field(fields, "metric")
        if best is None:
            return f"stopped at step {step}: {metric} was never a number"
        value = to_printable(format_value(best))
        return f"stopped at step {step}: {metric} no longer improved, its best value was {value}"
    if name == "finished":
        return _describe_end(fields)
    if name in _LESS:
        return _describe_less(name, fields)
    if name in ("resume_checked", "resume_differs", "config_changed", "options_replaced"):
        return _describe_check(name, fields)
    if name in ("notice", "preempted", "platform_detected"):
        return _describe_preemption(name, fields)
    if name == "training_evaluated":  # for people only if its metrics do not do what they expect
        what = format_metrics(fields.get("metrics"), _MAX_METRICS)
        is_unused = fields.get("state") == "INEXACT" and fields.get("cause")
        return f"evaluated {what}: {text_field(fields, 'cause')}" if is_unused else None
    is_all = fields.get("since") is None
    since = "all steps" if is_all else f"the steps after {text_field(fields, 'since')}"
    return {
        "began": f"started a new training in {text_field(fields, 'run')}: it has no version yet",
        "left_unsaved": f"left {since} up to {step} unsaved",
        "taken_over": f"closed an earlier Checkpointer of {text_field(fields, 'run')}",
        "save_failed": f"failed to save step {step}: {error}",
        "skipped": f"skipped {version}: {_error_without_todo(fields)}",
        "deleted": f"deleted {version}",
        "pin_left": f"could not remove the pin {text_field(fields, 'key')}: {error}",
        "worker_lost": f"replaced {text_field(fields, 'worker')}: {error}",
        "server_lost": f"lost {text_field(fields, 'servers')} of the tables",
        "buckets_returned": f"returned only {text_field(fields, 'server')} to {version}",
        "read_again": f"read again, and it was right: {_error_without_todo(fields)}",
        "notice_source_failed": f"could not watch {text_field(fields, 'source')} for notices:"
        f" {error}",
        "not_agreed": f"could not agree on {', '.join(_list_field(fields, 'wanted'))}: {error}",
        "savepoint_failed": f"could not capture or save the last step for a notice: {error}",
        "read_alone": f"read {text_field(fields, 'url')} without shared memory:"
        f" {text_field(fields, 'reason')}",
        "request_unseen": (
            f"could not check {text_field(fields, 'store')} for save requests or scores: {error}"
        ),
    }.get(name)


def _describe_resume(fields: Mapping[str, Any]) -> str:
    url, step = text_field(fields, "url"), text_field(fields, "step")
    branch = text_field(fields, "branch", "0")
    suffix = "" if branch == "0" else f", branch {branch}"
    saved = parse_version(url.rpartition("/")[2])
    if saved is None or str(saved.step) != step:  # a part of a version of another run
        return f"started at step {step} with state from {url}{suffix}"
    return f"resumed step {step} from {url}{suffix}{_describe_changes(fields)}"


def _describe_changes(fields: Mapping[str, Any]) -> str:
    """Return how the resumed training differs from the earlier one, after a colon."""
    changes = _list_field(fields, "changes") if fields.get("changes") else []
    return f": {'; '.join(changes)}" if changes else ""


def _describe_check(name: str, fields: Mapping[str, Any]) -> str:
    url, seconds = text_field(fields, "url"), number_field(fields, "seconds")
    if name == "config_changed":
        return f"resumed with another config: {format_list(_list_field(fields, 'changes'), 8)}"
    if name == "options_replaced":
        return f"resumed the options of {url}. {', '.join(_list_field(fields, 'options'))}"
    if name == "resume_differs":
        keys = format_list(_list_field(fields, "differing"), _MAX_KEYS)
        return f"resumed with differences from {url}: {keys}"
    nbytes = number_field(fields, "bytes")
    what = f"{format_size(nbytes)} as in" if nbytes else "all values as in"
    took = "" if seconds is None else f", compared in {format_duration(seconds)}"
    return f"resumed exactly: {what} {url}{took}{_describe_changes(fields)}"


def _describe_end(fields: Mapping[str, Any]) -> str:
    step, newest, run = (text_field(fields, name) for name in ("step", "saved", "run"))
    end = describe_newest(None if fields.get("saved") is None else newest)
    end = "it is saved" if step == newest else end
    if fields.get("error") is not None:
        cause = truncate(text_field(fields, "error"), 100)
        return f"ended after step {step} of {run}: {end}. The cause is {cause}"
    reason = text_field(fields, "reason", "finished")
    if step != newest:
        return f"{reason} at step {step} of {run}: {end}"
    if not fields.get("new", True):
        return f"{reason} without a new step: step {step} is the newest version of {run}"
    return f"{reason}: saved step {step} to {run}"


def _describe_preemption(name: str, fields: Mapping[str, Any]) -> str | None:
    source, seconds = text_field(fields, "source"), number_field(fields, "seconds")
    if name == "platform_detected":
        sources = _list_field(fields, "sources")
        return f"watching {', '.join(sources)} for notices" if fields.get("sources") else None
    if name == "notice":
        if seconds is None:
            return f"received a notice of {source}: training saves, and goes on"
        return f"received a notice of {source}: the process must end in {format_duration(seconds)}"
    step, saved, code = (text_field(fields, name) for name in ("step", "saved", "code"))
    left = number_field(fields, "seconds_left")
    end = "" if left is None else f", {format_duration(left)} before the deadline"
    when = "before the first step" if step == "0" else f"after step {step}"
    text = f"left {when} because of {source}, with code {code}{end}"
    if step != saved and code != "75" and fields.get("run") is not None:
        text += f"; {describe_newest(None if fields.get('saved') is None else saved)}"
    return text if fields.get("error") is None else f"{text}: {_error_without_todo(fields)}"


def _describe_late(fields: Mapping[str, Any]) -> str:
    ranks, count = _list_field(fields, "ranks"), fields.get("count")
    more = count - len(ranks) if type(count) is int else 0
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    text += (f" and {more} more" if more > 0 else "") + f" in {text_field(fields, 'what')}"
    longest = number_field(fields, "longest")
    text += f", and keeps waiting for up to {format_duration(longest)}" if longest else ""
    return text + (f". {text_field(fields, 'todo')}" if fields.get("todo") else "")


def _list_field(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return the members of a field that is a list, or its only value, as printable text."""
    value = fields.get(name)
    return [to_printable(to_json_value(v)) for v in (value if isinstance(value, list) else [value])]


def _error_without_todo(fields: Mapping[str, Any]) -> str:
    """Return the error of a skipped version without its advice, which no longer applies."""
    error = fields.get("error")
    if not isinstance(error, LimpetError):
        return text_field(fields, "error")
    return f"{type(error).__name__}: {to_printable(error.brief)}"


def _describe_less(name: str, fields: Mapping[str, object]) -> str:
    """Describe what a training does or saves less of than one may expect."""
    if name == "metric_missing":
        metrics, given = (", ".join(_list_field(fields, n)) for n in ("metrics", "given"))
        what = f"no version has {metrics}, which a policy uses; they have {given or 'no metrics'}."
        if not fields.get("inexact"):
            what += " Save the steps that have it, such as save=... | limpet.EveryEpoch(), or"
            return f"{what} evaluate them"
        what += f" {', '.join(_list_field(fields, 'inexact'))} was measured while the parameters"
        return f'{what} changed: use TrainingEvaluation(..., counts=True), or on="paused"'
    if name == "metrics_unwritten":
        run, error = text_field(fields, "run"), _error_without_todo(fields)
        return f"could not log the metrics of {run}, and tries it again: {error}"
    if name == "restarts_uncounted":
        return f"under `limpet run`: {text_field(fields, 'error')}"
    if name == "uncopied":
        error = text_field(fields, "error")
        return f"keeps a state in memory with fewer copies on other hosts: {error}"
    found = f"{text_field(fields, 'hosts')} instead of {text_field(fields, 'copies')} hosts"
    return f"keeps the states in memory on {found}, because the job runs on no more"
