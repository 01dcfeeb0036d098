"""Converts the errors of hdfs-native to those of a ``Store``."""

from __future__ import annotations

import re
from typing import Any

from limpet.errors import Denied, NoSpace, NotFound, StoreError, Unavailable
from limpet.storage.store import exists_error

_REMOTE = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)', re.DOTALL)
_NOT_FOUND = "FileNotFoundException"
_FILE_ABOVE = ("ParentNotDirectoryException", " is not a directory")
"""What a NameNode says of a path below a file. The exception depends on its method and version."""
_DENIED = {"AccessControlException", "AuthorizationException", "InvalidToken"}
_NO_SPACE = {"DSQuotaExceededException", "NSQuotaExceededException", "QuotaExceededException"}
_TRY_AGAIN = {
    "SafeModeException", "StandbyException", "RetriableException", "RetryStartFileException",
    "NotReplicatedYetException", "ServerTooBusyException",
}  # fmt: skip
_REPLICAS = ("could only be replicated to", "could only be written to")
"""The beginning of the message of a NameNode that knows no DataNode with space for a block."""
_NO_COPY = "All DataNodes failed"
_DATANODE = re.compile(r'host_name: \\?"([^"\\]*)\\?".*?xfer_port: ([0-9]+)', re.DOTALL)


def translate(error: BaseException, action: str, key: str, url: str) -> StoreError:
    """Return the error of the store for an error of hdfs-native, or for a call that was too slow.

    ``action``: "read", for the message. If it is "commit", the outcome of a failure may be unknown.
    Stack traces of the server are left out.
    """
    what = f"Cannot {action} {key or 'the folder'} in {url}"
    fields: dict[str, Any] = {"key": key, "store": url}
    unknown = {"outcome": "unknown"} if action == "commit" else {}
    missing = f"There is no {key} in {url}"
    if isinstance(error, TimeoutError):
        todo = "Check that the NameNode and the DataNodes run"
        return Unavailable(f"{what}: no answer", todo=todo, **unknown, **fields)
    text = str(error)
    if any(words in text for words in _FILE_ABOVE):
        if action not in ("write", "commit"):
            return NotFound(missing, **fields)
        todo = "Move the file away, or save elsewhere. Nothing was changed"
        return StoreError(f"{what}: a file is in the way", todo=todo, **fields)
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return NotFound(missing, **fields)
    if isinstance(error, FileExistsError):
        return exists_error(key, url)
    if isinstance(error, OSError):
        return Unavailable(f"{what}: {error}", **unknown, **fields)
    if isinstance(error, TypeError | ValueError | OverflowError):  # a value of this process
        return StoreError(f"{what}: {text[:300]}", todo="Check the options of the store", **fields)
    if (remote := _REMOTE.search(text)) is None:
        return _translate_client(text, what, fields, unknown)
    name = remote[1].rpartition(".")[2].rpartition("$")[2]
    message = remote[2].partition("\\n")[0]
    what = f"{what}: {name}: {message}"
    if name == _NOT_FOUND:
        return NotFound(missing, **fields)
    if name == "FileAlreadyExistsException":
        return exists_error(key, url)
    if name in _DENIED:
        todo = "Check the owner and permissions of the folder, and HADOOP_USER_NAME"
        return Denied(what, todo=todo, **fields)
    if name in _NO_SPACE:
        return NoSpace(what, todo="Raise the quota of the folder, or save elsewhere", **fields)
    if name in _TRY_AGAIN:
        return Unavailable(what, **fields)
    if any(text in message for text in _REPLICAS):
        todo = "Check that the DataNodes run, and that they have space"
        return Unavailable(what, todo=todo, **fields)
    return StoreError(what, **fields)


def _translate_client(
    text: str, what: str, fields: dict[str, Any], unknown: dict[str, str]
) -> StoreError:
    """Return the error for one that no server has sent. ``text`` describes it."""
    if "No NameNode hosts found" in text:
        return StoreError(
            f"{what}: the URL has no port, and no name service is known by this name",
            expected="hdfs://NAMENODE:PORT/folder, or a name service of hdfs-site.xml",
            todo="Add the port, or set HADOOP_CONF_DIR to the folder of hdfs-site.xml",
            **fields,
        )
    if text.startswith(("InvalidArgument", "UrlParseError", "InvalidPath")):
        todo = "Check the URL, and that HADOOP_CONF_DIR names the folder of hdfs-site.xml"
        return StoreError(f"{what}: {text}", todo=todo, **fields)
    if text.startswith(("SASL", "GSSAPI", "NoSASL")):
        todo = "Renew the Kerberos ticket (kinit)"
        return Denied(f"{what}: {text}", todo=todo, **fields)
    if _NO_COPY in text:
        # hdfs-native does not tell a DataNode that is away from one whose copy is damaged
        nodes = ", ".join(":".join(found) for found in _DATANODE.findall(text))
        todo = (
            "Check that these DataNodes run. If they do, every copy of a block is damaged:"
            " see hdfs fsck, and go back to another version"
        )
        what = f"{what}: no DataNode that has a copy returned the bytes"
        return Unavailable(what, found=nodes, todo=todo, **fields)
    return Unavailable(f"{what}: {text[:300]}", **unknown, **fields)
