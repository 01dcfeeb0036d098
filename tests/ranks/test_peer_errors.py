"""An error crosses a connection with its class and its parts."""

import msgspec
import pytest

from limpet import errors
from limpet.errors import JobFailed, LimpetError, NoSpace
from limpet.ranks.error_report import ErrorReport

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, LimpetError)]


def send(report):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ErrorReport).to_peer_error()


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_of_limpet_arrives(kind):
    error = kind("No room", expected="5", found=3, todo="Buy some")
    found = send(ErrorReport.of(error))
    assert (type(found), str(found)) == (kind, str(error))


@pytest.mark.parametrize("name", ["SystemExit", "ValueError", "Any", "annotations", "", "nothing"])
def test_no_other_class_is_raised(name):
    report = msgspec.structs.replace(ErrorReport.of(NoSpace("x")), name=name)
    assert type(send(report)) is LimpetError
    builtin = msgspec.structs.replace(report, module="builtins")
    assert type(send(builtin)) is LimpetError


def test_a_class_of_the_user_arrives_as_a_limpet_error():
    class Own(JobFailed):
        pass

    found = send(ErrorReport.of(Own("x")))
    assert (type(found), found.what) == (LimpetError, "x")


def test_a_text_may_have_surrogates_and_any_length():
    found = send(ErrorReport.of(NoSpace("\udcff" * 10_000, found="\udcff")))
    assert found.what == r"\udcff" * 4000
    assert found.found == r"\udcff"
