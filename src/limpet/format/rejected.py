"""Values that cannot be saved: how to convert each kind; one error lists all of a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from limpet.errors import Unsupported
from limpet.text import MAX_SHOWN, format_list, with_article

_LEAVE_OUT = "Leave it out of the state, and create it again when the program starts"
_CODE = "Code is never saved: leave it out of the state, or save a name by which you find it again"
_NUMPY_RANDOM = "Save generator.bit_generator.state, and assign it after the load"

_ADVICE_BY_CLASS = {
    "pathlib.PurePath": "Save str(path)",
    "datetime.date": "Save value.isoformat(), which fromisoformat() of its class reads",
    "datetime.time": "Save value.isoformat(), which fromisoformat() of its class reads",
    "datetime.timedelta": "Save (value.days, value.seconds, value.microseconds)",
    "decimal.Decimal": "Save str(value)",
    "uuid.UUID": "Save str(value)",
    "enum.Flag": "Save member.value, from which Class(value) returns the member",
    "enum.Enum": "Save member.name, from which Class[name] returns the member",
    "argparse.Namespace": "Save vars(value)",
    "types.SimpleNamespace": "Save vars(value)",
    "collections.deque": "Save list(value)",
    "array.array": "Save numpy.asarray(value)",
    "builtins.range": "Save (value.start, value.stop, value.step)",
    "random.Random": "Save generator.getstate(), and call setstate() after the load",
    "numpy.generic": "Save value.item()",
    "numpy.Generator": _NUMPY_RANDOM,
    "numpy.RandomState": "Save generator.get_state(), and call set_state() after the load",
    "numpy.BitGenerator": "Save generator.state, and assign it after the load",
    "numpy.ndarray": "Save numpy.asarray(array)",
    "numpy.MaskedArray": "Save numpy.asarray(array.data) and numpy.asarray(array.mask)",
    "torch.Generator": "Save generator.get_state(), and call set_state() after the load"
    " (limpet.RNG() saves the default generators)",
    "torch.dtype": "Save str(value)",
    "torch.device": "Save str(value)",
    "torch.Size": "Save tuple(value)",
    "pandas.DataFrame": 'Save frame.to_dict("list")',
    "pandas.Series": "Save series.to_list()",
    "PIL.Image": "Save numpy.asarray(image)",
    "omegaconf.BaseContainer": "Save OmegaConf.to_container(value)",
    "pydantic.BaseModel": "Save value.model_dump()",
    "jaxlib.ArrayImpl": "Save numpy.asarray(value)",
    "scipy._spbase": "Save value.tocoo(): its row, col, data, and shape",
    "builtins.function": _CODE,
    "builtins.builtin_function_or_method": _CODE,
    "builtins.method": _CODE,
    "functools.partial": _CODE,
    "builtins.module": _CODE,
    "builtins.generator": "Save its position, and create it again at that position",
    "_io.BytesIO": "Save file.getvalue()",
    "_io.StringIO": "Save file.getvalue()",
    "_io._IOBase": "Leave it out of the state. Of a file with a path, save the path and"
    " file.tell(), and open it again",
    "logging.Logger": _LEAVE_OUT,
    "threading.Thread": _LEAVE_OUT,
    "_thread.lock": _LEAVE_OUT,
}
"""By the package and the name of a class: advice for its instances and those of its subclasses. The
classes are not imported, and their modules may move within a package."""

_PLAIN_CLASSES = (dict, tuple, list, set, frozenset, str, bytes, int, float)
"""Instances of exactly these classes are refused for another reason than their class."""

_GENERAL = (
    "Convert it to tensors, arrays, numbers, strings, lists, and dicts, or give the object"
    " state_dict() and load_state_dict()"
)

NOT_PLAIN = "it is not a tensor, an array, or a plain value"

_MAX_KINDS = 50
"""The maximum number of kinds of values that a message lists."""

_MAX_KEY = 300
"""The maximum number of characters of a key that a message shows."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A value that cannot be saved. ``member``: the object whose ``state_dict()`` has it."""

    key: str
    kind: str
    why: str
    advice: str
    member: str = ""


def unsupported(value: Any, key: str, why: str, advice: str = "") -> Unsupported:
    """Return the error for a value that cannot be saved. ``advice``: how to convert it, if that
    depends on more than its class."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = advice or _advise(value)
    return Unsupported(
        f"{key[:_MAX_KEY] or 'The state'!r} is {with_article(kind)} that cannot be saved"
        f" faithfully: {why}",
        todo=advice,
        leaf=key,
        leaves=(key,),
        rejections=[Rejection(key, kind, why, advice)],
    )


def _advise(value: Any) -> str:
    """Return how to save a value of this class, which alone is looked at: no code of it runs."""
    kind = type(value)
    if isinstance(value, type):
        return "Save an object of this class, not the class itself, or save the class's name"
    if hasattr(kind, "state_dict") != hasattr(kind, "load_state_dict"):
        lacks = "load_state_dict" if hasattr(kind, "state_dict") else "state_dict"
        return f"Give its class {lacks}(), too"
    if is_dataclass(kind):
        return "Save dataclasses.asdict(value)"
    if issubclass(kind, tuple) and hasattr(kind, "_asdict"):
        return "Save value._asdict()"
    if hasattr(kind, "__attrs_attrs__"):
        return "Save attrs.asdict(value)"
    if kind not in _PLAIN_CLASSES:
        for base in kind.__mro__:
            if base in _PLAIN_CLASSES:
                return f"Save {base.__name__}(value)"
            package = base.__module__.partition(".")[0]
            if (advice := _ADVICE_BY_CLASS.get(f"{package}.{base.__qualname__}")) is not None:
                return advice
    return _GENERAL


def nested_too_deeply(value: Any, key: str, why: str) -> Unsupported:
    """Return the error for a value that is nested too deeply. It ends the search for more values,
    because a value that contains itself twice has no end of paths."""
    error = unsupported(value, key, why, "Remove the reference to itself, or use fewer levels")
    error.fields["ends_search"] = True
    return error


def collect(errors: Sequence[Unsupported]) -> Unsupported:
    """Return the first error, which then has the rejections of all."""
    first, *others = errors
    rejections = rejections_of(first)
    for other in others:
        rejections += rejections_of(other)
    first.fields["rejections"] = rejections
    return first


def rejections_of(error: Unsupported) -> list[Rejection]:
    """Return the values that an error is about."""
    found: list[Rejection] | None = error.fields.get("rejections")
    if found is not None:
        return found
    return [Rejection(error.fields.get("leaf", ""), "", error.what, error.todo or "")]


def ends_search(error: Unsupported) -> bool:
    """Return True if no more values are looked for after this error."""
    return "ends_search" in error.fields


def rejections_within(error: Unsupported, member: str) -> list[Rejection]:
    """Return the values that an error is about, as values in the ``state_dict()`` of ``member``."""
    return [replace(r, member=r.member or member) for r in rejections_of(error)]


def list_all(error: Unsupported) -> Unsupported:
    """Return one error for all rejections of ``error``: itself, if there is only one."""
    rejections = rejections_of(error)
    if len(rejections) == 1:
        return error
    keys: dict[tuple[str, str, str, str], list[str]] = {}
    for r in rejections:
        keys.setdefault((r.member, r.kind, r.why, r.advice), []).append(r.key)
    return Unsupported(
        f"{len(rejections)} values of the state cannot be saved faithfully",
        found=format_list(
            [_describe(*kind, found) for kind, found in keys.items()], _MAX_KINDS, "; "
        ),
        todo="Convert each of them as it says, or give the object that has it state_dict() and"
        " load_state_dict(). The error's field leaves has all keys",
        leaf=rejections[0].key,
        leaves=tuple(r.key for r in rejections),
    )


def _describe(member: str, kind: str, why: str, advice: str, keys: list[str]) -> str:
    """Describe the rejections that differ only in their keys."""
    shown = [repr(key[:_MAX_KEY]) for key in keys[:MAX_SHOWN]]
    names = format_list(shown, MAX_SHOWN, total=len(keys))
    noun = with_article(kind) if len(keys) == 1 else f"each {with_article(kind)}"
    where = f" in the state_dict() of {member}" if member else ""
    if not kind:
        return f"{why} ({advice})"
    return f"{names}, {noun}{where} ({advice if why == NOT_PLAIN else f'{why}. {advice}'})"
