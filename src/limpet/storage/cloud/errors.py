"""Converts the errors of obstore to those of a ``Store``.

obstore describes failures only in text, which may contain URLs and whole replies. Messages show
nothing of it but the status, the code, and the message of a reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limpet.errors import Denied, NotFound, StoreError, Unavailable

_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})")
_CODE = re.compile(r"<Code>\s*(\w{1,80})\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<\n]{1,200})")
_SECRET = re.compile(r"sig=|se=|signature=|://|Bearer", re.IGNORECASE)
_NOT_SENT = re.compile(r"kind: Connect,|ConnectError\(|dns error|tcp connect error")
_NO_CONTAINER = re.compile(
    r"ContainerNotFound|NoSuchBucket|specified (?:container|bucket) does not exist"
)
_KEY_FILE = re.compile(r"service account file|OpenCredentials|DecodeCredentials|ReadCredentials")
_TLS = re.compile(
    r"corrupt message|InvalidContentType|invalid peer certificate|InvalidCertificate"
    r"|HandshakeFailure|ProtocolVersion|invalid HTTP version|Parse\(\s*Version"
)
_FOREIGN = re.compile(r"Header missing from response|invalid (?:list|bulk delete) response")
_BAD_REPLY = re.compile(
    r"HTTP error|body error|missing from response|invalid (?:list|bulk delete) response"
    r"|response body|error decoding|Error receiving"
)

_CREDENTIALS = {
    "az": "Tried: the options account_key and sas_token of limpet.open_store, the variables"
    " AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, and"
    " AZURE_CLIENT_ID with AZURE_CLIENT_SECRET and AZURE_TENANT_ID, and a managed identity."
    " With AZURE_USE_AZURE_CLI=true, the login of the Azure CLI is used",
    "gs": "Tried: the option service_account of limpet.open_store, the variables"
    " GOOGLE_SERVICE_ACCOUNT and GOOGLE_APPLICATION_CREDENTIALS, the file of `gcloud auth"
    " application-default login`, and the metadata service",
}

_PERMISSIONS = {
    "az": "Check the account and its key; a SAS needs read, add, create, write, delete, and list"
    " of the container, and must not have expired",
    "gs": "Allow storage.objects.create, get, list, and delete, for example by the role"
    " Storage Object User",
}


@contextmanager
def translated(action: str, key: str, url: str) -> Iterator[None]:
    """Raise an error of the block as that of the store at ``url``, without the text of obstore."""
    try:
        yield
    except Exception as e:  # noqa: BLE001  (the cause is left out because it may show credentials)
        raise translate(e, action, key, url) from None


def translate(error: Exception, action: str, key: str, url: str) -> StoreError:
    """Return the error of the store at ``url`` for an error of obstore.

    ``action``: "read", for the message. Fields: ``status`` of the reply; ``throttled`` and
    ``outcome`` for ``Throttle``; ``foreign`` if the reply may be that of another kind of server.
    """
    if isinstance(error, StoreError):
        return error
    scheme = url.partition(":")[0]
    text, kind = str(error), type(error).__name__
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    what = f"Cannot {action} {key} in {url}" if key else f"Cannot {action} {url}"
    fields: dict[str, Any] = {"key": key, "store": url, "status": status}
    if isinstance(error, TimeoutError) or "cannot start a thread" in text:  # of ``call_within``
        kind_of_error = Unavailable if isinstance(error, TimeoutError) else StoreError
        found_text = "the server is too slow" if isinstance(error, TimeoutError) else text
        return kind_of_error(f"{what}: {found_text}", **fields)
    if "token request" in text or "azure cli" in text.lower():
        if status == 429 or status >= 500:
            return Unavailable(f"{what}: the credentials cannot be fetched: {status}", **fields)
        return Denied(f"{what}: there are no credentials", todo=_CREDENTIALS[scheme], **fields)
    if status:
        return _translate_status(status, f"{what}: {_reason(status, text)}", text, fields)
    if _KEY_FILE.search(text):  # which may be the key itself, instead of the path of a file
        todo = "service_account= and GOOGLE_SERVICE_ACCOUNT must be the path of a key file"
        return StoreError(f"{what}: the file with the key cannot be read", todo=todo, **fields)
    if "credential provider" in text:  # of an option
        todo = "Check account_key= and sas_token="
        return Denied(f"{what}: the credentials are not valid", todo=todo, **fields)
    if _TLS.search(text):
        todo = "Check whether the endpoint begins with http:// or https://, and its certificate"
        return StoreError(f"{what}: TLS failed, or the server needs it", todo=todo, **fields)
    if _NOT_SENT.search(text):
        return Unavailable(
            f"{what}: the server cannot be reached", todo="Check the endpoint", **fields
        )
    if _BAD_REPLY.search(text):
        if _FOREIGN.search(text):
            fields["foreign"] = True
        return Unavailable(f"{what}: there is no valid reply", outcome="unknown", **fields)
    if kind == "InvalidPathError":  # the name of an object of somebody else
        todo = "Rename or delete that object: its name has an empty or a relative part"
        return StoreError(f"{what}: {_first_line(text)}", todo=todo, **fields)
    if isinstance(error, ValueError | TypeError):  # raised before a request was sent
        todo = "Use a name without control characters"
        return StoreError(f"{what}: obstore refuses the name", todo=todo, **fields)
    return StoreError(f"{what}: {_first_line(text)}", todo=_CREDENTIALS[scheme], **fields)


def _translate_status(status: int, what: str, text: str, fields: dict[str, Any]) -> StoreError:
    key, url = fields["key"], fields["store"]
    scheme = url.partition(":")[0]
    if _NO_CONTAINER.search(text) or (status == 404 and not key):
        todo = "Create it, or check its name and the account"
        container = "/".join(url.split("/")[:3])
        return StoreError(f"There is no {container}", todo=todo, **fields)
    if status == 404:
        return NotFound(f"There is no {key} in {url}", **fields)
    if status in (401, 403):
        return Denied(what, todo=_PERMISSIONS[scheme], **fields)
    if status in (429, 503):
        if status == 503 and not _CODE.search(text):
            fields["outcome"] = "unknown"  # a proxy may have passed the request on
        return Unavailable(what, throttled=True, **fields)
    if status == 408 or (status >= 500 and status != 501):
        return Unavailable(what, outcome="unknown", **fields)
    return StoreError(what, todo="Check the endpoint and the container", **fields)


def _reason(status: int, text: str) -> str:
    """Return what a reply says, without what may be a credential."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    parts = [str(status)] + [found[1].strip() for found in (code, message) if found]
    return ": ".join(part for part in parts if not _SECRET.search(part))


def _first_line(text: str) -> str:
    line = re.sub(r"^Generic \w+ error: ", "", text.partition("\n")[0])
    return "the reason may contain credentials" if _SECRET.search(line) else line[:200]
