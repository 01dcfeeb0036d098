"""Events in words: sizes, times, metrics, sentences; and any value as JSON can say it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from math import isfinite, prod
from numbers import Real
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.format.names import parse_version

_DEEPEST = 8
_LONGEST = 200
_METRICS = 4
_NAME = 24


def amount(fields: Mapping[str, Any], name: str) -> float | None:
    """A field that is a number of bytes or seconds; None if there is no such."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) and number >= 0 else None


def rate(fields: Mapping[str, Any]) -> float | None:
    """Bytes a second of a ``saved`` event: what it wrote itself, over its background half."""
    nbytes, seconds = amount(fields, "bytes"), amount(fields, "seconds")
    return nbytes / seconds if nbytes and seconds else None


def size(nbytes: float) -> str:
    """Bytes in three digits, at most 8 characters up to PiB: ``1.31 GiB``."""
    if nbytes < 999.5:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 999.5:
            return f"{_three(nbytes)} {unit}"
    return f"{_three(nbytes / 1024)} PiB"


def span(seconds: float) -> str:
    """Seconds in three digits, in the unit that fits: ``12.3 ms``."""
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    for limit, unit, length in ((0.9995, "ms", 1e-3), (119.5, "s", 1), (119.5 * 60, "min", 60)):
        if seconds < limit:
            return f"{_three(seconds / length)} {unit}"
    return f"{_three(seconds / 3600)} h"


def _three(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def short(metrics: object) -> str:
    """The first metrics on one line: ``loss 0.25, accuracy 0.9``."""
    if not isinstance(metrics, Mapping):
        return ""
    shown = [f"{_clip(str(n), _NAME)} {_figure(v)}" for n, v in islice(metrics.items(), _METRICS)]
    more = len(metrics) - len(shown)
    return clean(", ".join(shown) + (f", {more} more" if more else ""))


def _figure(value: object) -> str:
    said = plain(value)
    return f"{said:.4g}" if isinstance(said, float) else _clip(str(said), _NAME)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 2] + ".."


def clean(text: object) -> str:
    """Text from outside: one line, and nothing in it that steers a terminal."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in str(text)
    )


def told(fields: Mapping[str, Any], name: str, missing: str = "?") -> str:
    """A field as clean text."""
    return clean(plain(fields.get(name, missing)))


def pieces(fields: Mapping[str, Any]) -> dict[str, str]:
    """What there is to say about a ``saved`` event; a piece that is not known is empty."""
    nbytes, seconds = amount(fields, "bytes"), amount(fields, "seconds")
    blocked, referred = amount(fields, "blocked"), amount(fields, "referred")
    speed, reason = rate(fields), told(fields, "reason", "cadence")
    return {
        "step": told(fields, "step"),
        "size": "" if nbytes is None else size(nbytes),
        "seconds": "" if seconds is None else span(seconds),
        "rate": "" if speed is None else f"{size(speed)}/s",
        "blocked": "" if blocked is None else span(blocked),
        "referred": f"+ {size(referred)} referred" if referred else "",
        "reason": "" if reason == "cadence" else reason,
        "metrics": short(fields.get("metrics")),
    }


def sentence(name: str, fields: Mapping[str, Any]) -> str | None:
    """An event as one line that begins with a verb; None for one that people need not see."""
    step, version, error = (told(fields, name) for name in ("step", "version", "error"))
    if name == "saved":
        said = pieces(fields)
        rest = [" in ".join(filter(None, (said["size"], said["seconds"]))), said["rate"]]
        rest += [f"blocked {said['blocked']}"] if said["blocked"] else []
        rest += [said["referred"], said["reason"], said["metrics"]]
        return ": ".join(filter(None, (f"saved step {step}", ", ".join(filter(None, rest)))))
    if name == "resumed":
        branch = told(fields, "branch", "0")
        at = "" if branch == "0" else f", branch {branch}"
        url = told(fields, "url")
        saved = parse_version(url.rpartition("/")[2])
        if saved is None or str(saved.step) != step:  # of another run, and in part
            return f"began at step {step} with what {url} holds{at}"
        return f"resumed step {step} from {url}{at}"
    if name == "save_waited":
        seconds = amount(fields, "seconds")
        waited = "" if seconds is None else f"{span(seconds)} "
        return f"waited {waited}to save step {step}: one was under way"
    if name == "ranks_awaited":
        seconds, longest = amount(fields, "seconds"), amount(fields, "longest")
        waited = "" if seconds is None else f"{span(seconds)} "
        end = "" if longest is None else f", and goes on for up to {span(longest)}"
        return f"waited {waited}for {_ranks(fields)} in {told(fields, 'what')}{end}"
    if name == "structure_changed":
        counts = {kind: fields.get(kind) for kind in ("added", "removed", "changed")}
        leaves = [f"{len(v)} {kind}" for kind, v in counts.items() if isinstance(v, list) and v]
        return f"noticed that the state has other leaves in {version}: {', '.join(leaves)}"
    if name == "stopped":
        best = fields.get("best")
        was = "never was a number" if best is None else f"was at best {clean(_figure(best))}"
        return f"stopped improving at step {step}: {told(fields, 'metric')} {was}"
    return {
        "began": f"began a training in {told(fields, 'run')}: no version is there yet",
        "left_unsaved": f"left the steps after {told(fields, 'since')} up to {step} unsaved:"
        " ckpt.save() at the end keeps them",
        "save_failed": f"failed to save step {step}: {error}",
        "save_skipped": f"skipped the save of step {step}: one was under way",
        "skipped": f"skipped {version}: {_without_todo(fields)}",
        "deleted": f"deleted {version}",
        "pin_left": f"left the pin {told(fields, 'key')} behind: {error}",
        "not_agreed": f"could not agree on {_wanted(fields)}: {error}",
        "read_alone": f"read {told(fields, 'url')} without sharing: {told(fields, 'reason')}",
        "request_unseen": f"lost sight of requests in {told(fields, 'store')}: {error}",
    }.get(name)


def _ranks(fields: Mapping[str, Any]) -> str:
    ranks, count = fields.get("ranks"), fields.get("count")
    shown = ranks if isinstance(ranks, list) else [ranks]
    more = count - len(shown) if type(count) is int else 0
    said = f"rank{'s' if len(shown) > 1 else ''} {', '.join(clean(plain(r)) for r in shown)}"
    return said + (f" and {more} more" if more > 0 else "")


def _wanted(fields: Mapping[str, Any]) -> str:
    wanted = fields.get("wanted")
    several = wanted if isinstance(wanted, list) else [wanted]
    return ", ".join(told({"one": one}, "one") for one in several)


def _without_todo(fields: Mapping[str, Any]) -> str:
    """The error of a version that was passed over: there is nothing left to do."""
    error = fields.get("error")
    if not isinstance(error, HoldfastError):
        return told(fields, "error")
    short = HoldfastError(error.what, expected=error.expected, found=error.found)
    return clean(f"{type(error).__name__}: {short}")


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can say it; never raises.

    Tensors and arrays of one element are numbers, errors are text. What JSON has no word for
    becomes text: ``"nan"``, ``"inf"``, integers beyond 64 bits in hexadecimal, and whatever else
    as Python writes it, cut short.
    """
    try:
        return _plain(value, depth)
    except Exception:  # noqa: BLE001  (an odd value costs itself, not the line)
        return f"<{type(value).__qualname__}>"


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return float(value) if isfinite(value) else repr(float(value))
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}".removesuffix(": ")
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else repr(k): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, depth + 1) for v in value]
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        if prod(shape) == 1:
            return plain(value.item(), depth + 1)
        return f"<{type(value).__qualname__} of shape {tuple(shape)}>"
    return _clip(repr(value), _LONGEST)
