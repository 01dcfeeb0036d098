"""Advice for values that cannot be saved: how to convert a value of each kind."""

from __future__ import annotations

import dataclasses
from typing import Any

_LEAVE_OUT = "Leave it out of the state, and create it again when the program starts"
_CODE = "Code is never saved: leave it out of the state, or save a name by which you find it again"
_NUMPY_RANDOM = "Save generator.bit_generator.state, and assign it after the load"

ADVICE_BY_CLASS = {
    "pathlib.PurePath": "Save str(path)",
    "datetime.date": "Save value.isoformat(), which fromisoformat() of its class reads",
    "datetime.time": "Save value.isoformat(), which fromisoformat() of its class reads",
    "datetime.timedelta": "Save (value.days, value.seconds, value.microseconds)",
    "datetime.tzinfo": "Save str(value)",
    "decimal.Decimal": "Save str(value)",
    "fractions.Fraction": "Save (value.numerator, value.denominator)",
    "uuid.UUID": "Save str(value)",
    "enum.Enum": "Save member.name, from which Class[name] returns the member",
    "argparse.Namespace": "Save vars(value)",
    "types.SimpleNamespace": "Save vars(value)",
    "types.MappingProxyType": "Save dict(value)",
    "collections.deque": "Save list(value)",
    "collections.UserDict": "Save dict(value)",
    "collections.UserList": "Save list(value)",
    "array.array": "Save numpy.asarray(value)",
    "builtins.memoryview": "Save bytes(value)",
    "builtins.range": "Save (value.start, value.stop, value.step)",
    "builtins.slice": "Save (value.start, value.stop, value.step)",
    "random.Random": "Save generator.getstate(), and call setstate() after the load",
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
    "torch.layout": "Save str(value)",
    "torch.memory_format": "Save str(value)",
    "torch.finfo": "Save the dtype",
    "torch.iinfo": "Save the dtype",
    "torch.UntypedStorage": "Save a tensor: torch.tensor(storage, dtype=torch.uint8)",
    "torch.TypedStorage": "Save a tensor of this storage",
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
    "builtins.code": _CODE,
    "builtins.generator": "Save its position, and create it again at that position",
    "_io._IOBase": "Save its name and file.tell(), and open it again",
    "logging.Logger": _LEAVE_OUT,
    "threading.Thread": _LEAVE_OUT,
    "_thread.lock": _LEAVE_OUT,
    "_thread.RLock": _LEAVE_OUT,
    "_socket.socket": _LEAVE_OUT,
    "builtins.dict": "Save dict(value)",
    "builtins.tuple": "Save tuple(value)",
    "builtins.list": "Save list(value)",
    "builtins.set": "Save set(value)",
    "builtins.frozenset": "Save frozenset(value)",
    "builtins.str": "Save str(value)",
    "builtins.bytes": "Save bytes(value)",
    "builtins.int": "Save int(value)",
    "builtins.float": "Save float(value)",
}
"""By the package and the name of a class: advice for its instances and those of its subclasses. The
classes are not imported, and their modules may move within a package."""

_PLAIN_CLASSES = (dict, tuple, list, set, frozenset, str, bytes, int, float)
"""Instances of exactly these classes are refused for another reason than their class."""

GENERAL = (
    "Convert it to tensors, arrays, numbers, strings, lists, and dicts, or give the object"
    " state_dict() and load_state_dict()"
)


def advise(value: Any) -> str:
    """Return how to save a value of this kind. Only the value's class is looked at, and no code of
    the value runs."""
    kind = type(value)
    if isinstance(value, type):
        return "Save an object of this class, not the class itself, or save the class's name"
    if hasattr(kind, "state_dict") != hasattr(kind, "load_state_dict"):
        lacks = "load_state_dict" if hasattr(kind, "state_dict") else "state_dict"
        return f"Give its class {lacks}(), too"
    if dataclasses.is_dataclass(kind):
        return "Save dataclasses.asdict(value)"
    if issubclass(kind, tuple) and hasattr(kind, "_asdict"):
        return "Save value._asdict()"
    if hasattr(kind, "__attrs_attrs__"):
        return "Save attrs.asdict(value)"
    if kind not in _PLAIN_CLASSES:
        for base in kind.__mro__:
            package = base.__module__.partition(".")[0]
            if (advice := ADVICE_BY_CLASS.get(f"{package}.{base.__qualname__}")) is not None:
                return advice
    return GENERAL
