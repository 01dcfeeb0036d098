"""The options of ``az://`` and ``gs://``, and the clients of one account or server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, ClassVar

from limpet.errors import Denied, NotFound, StoreError, Unavailable
from limpet.settings import OBSTORE_VARIABLES, find_variables
from limpet.storage.options import INSTALL, WEB_URL, BucketOptions, fit_timeout, is_web_url, text
from limpet.storage.retry import Server
from limpet.text import with_article
from limpet.version import __version__


@dataclass(frozen=True, slots=True)
class CloudOptions(BucketOptions):
    """What the options of ``az://`` and ``gs://`` have in common. See also ``BucketOptions``.

    ``anonymous``: only read. ``part_size``: an upload keeps up to six parts in memory.
    ``concurrency``: without the parts of uploads, of which each upload sends up to four at once.
    """

    scheme: ClassVar[str] = ""
    hidden_uploads: ClassVar[str] = ""

    def config(self) -> dict[str, Any]:
        """Return the options as obstore names them. What it lacks comes from the environment."""
        raise NotImplementedError

    def credential(self) -> dict[str, Any] | None:
        """Return the credential that is given, for a provider of obstore. It takes precedence over
        the environment variables, unlike what ``config`` returns."""
        return None


@dataclass(frozen=True, slots=True)
class AzureOptions(CloudOptions):
    """The options of ``limpet.open_store("az://...", **options)``. See also ``CloudOptions``.

    What is None comes from the environment variables that begin with ``AZURE_``, the Azure CLI, or
    a managed identity. ``account``: the name of the storage account. ``account_key`` or
    ``sas_token``: the credentials, instead of all those of the environment.
    """

    account: str | None = text("the name of an account", bool)
    account_key: str | None = text("the base64 text of a key", bool, is_secret=True)
    sas_token: str | None = text("a text with sig=", lambda s: "sig=" in s, is_secret=True)

    kind: ClassVar[str] = "an az:// store"
    scheme: ClassVar[str] = "az"
    hidden_uploads: ClassVar[str] = "Azure deletes them after 7 days"

    def check_combination(self) -> None:
        names = ("account_key", "sas_token", "anonymous")
        given = [f"{name}=" for name in names if getattr(self, name)]
        if len(given) > 1:
            raise StoreError("An az:// store has two credentials", found=" and ".join(given))

    def config(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "account_name": self.account,
            "skip_signature": self.anonymous or None,
        }

    def credential(self) -> dict[str, Any] | None:
        if self.sas_token is not None:
            return {"sas_token": self.sas_token, "expires_at": None}
        if self.account_key is None and not self.anonymous:
            return None
        # without a signature, obstore would still check the key of the environment
        return {"access_key": self.account_key or "", "expires_at": None}


@dataclass(frozen=True, slots=True)
class GoogleOptions(CloudOptions):
    """The options of ``limpet.open_store("gs://...", **options)``. See also ``CloudOptions``.

    What is None comes from the environment variables that begin with ``GOOGLE_``, the file of
    ``gcloud auth application-default login``, or the metadata service. ``service_account``: the
    path of a file with a key.
    """

    service_account: str | None = text(
        "the path of a key file",
        lambda s: not s.lstrip().startswith(("{", "-----BEGIN")),
        is_secret=True,
    )

    kind: ClassVar[str] = "a gs:// store"
    scheme: ClassVar[str] = "gs"
    hidden_uploads: ClassVar[str] = (
        'add this rule to the bucket: {"rule": [{"action": {"type":'
        ' "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}]}'
    )

    def config(self) -> dict[str, Any]:
        return {
            "base_url": self.endpoint,
            "service_account": self.service_account,
            "skip_signature": self.anonymous or None,
        }


class CloudServer(Server):
    """The clients with certain options in this process."""

    def __init__(self, options: CloudOptions, variables: frozenset[tuple[str, str]]) -> None:
        super().__init__(options.concurrency, options.timeout)
        self.options = options
        own = {"az": "AZURE_", "gs": "GOOGLE_"}[options.scheme]
        for name, value in variables if options.endpoint is None else ():
            if name in _URL_VARIABLES and name.startswith(own) and not is_web_url(value):
                raise StoreError(f"Invalid value for the variable {name}", expected=WEB_URL)
        self._allow_http = any(
            url.startswith("http://")
            for url in (options.endpoint or "", *(v for n, v in variables if n in _URL_VARIABLES))
        )
        self._clients: dict[tuple[str, int], Any] = {}
        self._lock = Lock()

    def client(self, container: str, seconds_left: float, longest: int) -> Any:
        """Return a client that repeats nothing, with a timeout within both limits, or of 1 s."""
        timeout = fit_timeout(min(seconds_left, longest))
        with self._lock:
            if (client := self._clients.get((container, timeout))) is None:
                client = self._create_client(container, timeout, 0)
                self._clients[container, timeout] = client
        return client

    def streaming_client(self, container: str, seconds: float) -> Any:
        """Return a client for one upload. It repeats a request for at most ``seconds``."""
        timeout = fit_timeout(seconds / 3)
        return self._create_client(container, timeout, max(0.0, seconds - timeout))

    def forget_clients(self) -> None:
        """Let the next request create a client, which looks for credentials again."""
        self._clients = {}

    def _create_client(self, container: str, timeout: int, retry_seconds: float) -> Any:
        from obstore import store

        classes: dict[str, Callable[..., Any]] = {"az": store.AzureStore, "gs": store.GCSStore}
        options = self.options
        is_writer, longest_pause = retry_seconds > 0, min(5.0, retry_seconds / 4)
        credential = options.credential()
        provider = {} if credential is None else {"credential_provider": lambda: credential}
        with translated("open", "", f"{options.scheme}://{container}"):
            return classes[options.scheme](
                container,
                config={k: v for k, v in options.config().items() if v is not None},
                **provider,
                client_options={
                    "timeout": timedelta(seconds=timeout),
                    "connect_timeout": timedelta(seconds=min(timeout, 15)),
                    # a stalled read is resumed soon; the writer of a part reads when it has written
                    "read_timeout": timedelta(
                        seconds=timeout if is_writer else max(1, timeout / 4)
                    ),
                    "allow_http": self._allow_http,
                    "user_agent": f"limpet/{__version__}",
                },
                retry_config={
                    "max_retries": 1000 if is_writer else 0,
                    "retry_timeout": timedelta(seconds=retry_seconds - longest_pause),
                    "backoff": {
                        "init_backoff": timedelta(seconds=min(0.1, longest_pause)),
                        "max_backoff": timedelta(seconds=longest_pause),
                        "base": 2,
                    },
                },
            )


_URL_VARIABLES = {"AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL"}
_servers: dict[tuple[CloudOptions, frozenset[tuple[str, str]]], CloudServer] = {}
_process: list[int] = []  # the first one that used obstore


def shared_server(options: CloudOptions) -> CloudServer:
    """Return the server that stores with these options and environment variables share. Fails after
    a fork: obstore's threads stay in the parent, and calls would wait forever."""
    try:
        import obstore  # noqa: F401
    except ImportError as e:
        kind = with_article(f"{options.scheme}:// store").capitalize()
        raise StoreError(f"{kind} needs the package obstore", todo=INSTALL) from e
    if not _process:
        _process.append(os.getpid())
    if _process[0] != os.getpid():
        raise StoreError(
            f"{options.scheme}:// cannot be used in a process forked from one that used it",
            todo="Start the process with the method 'spawn' or 'forkserver' of multiprocessing",
        )
    variables = find_variables(OBSTORE_VARIABLES)
    key = (options, variables)
    found = _servers.get(key)  # each request asks for it
    return _servers.setdefault(key, CloudServer(options, variables)) if found is None else found


_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})")
_CODE = re.compile(r"<Code>\s*(\w{1,80})\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<\n]{1,200})")
_SECRET = re.compile(r"sig=|se=|signature=|://|Bearer", re.IGNORECASE)
_NOT_SENT = re.compile(r"kind: Connect,|ConnectError\(|dns error|tcp connect error")
_NO_CONTAINER = re.compile(
    r"ContainerNotFound|NoSuchBucket|specified (?:container|bucket) does not exist"
)
_BAD_CREDENTIALS = re.compile(
    r"service account file|OpenCredentials|DecodeCredentials|ReadCredentials|credential provider"
)
_TLS = re.compile(
    r"corrupt message|InvalidContentType|invalid peer certificate|InvalidCertificate"
    r"|HandshakeFailure|ProtocolVersion|invalid HTTP version|Parse\(\s*Version"
)
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
    """Return the store's error for one of obstore. Fields: ``status``; ``throttled`` and
    ``outcome`` for ``Throttle``."""
    if isinstance(error, StoreError):
        return error
    scheme = url.partition(":")[0]
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    what = f"Cannot {action} {key} in {url}" if key else f"Cannot {action} {url}"
    fields: dict[str, Any] = {"key": key, "store": url, "status": status}
    if isinstance(error, TimeoutError):  # of ``call_within``
        return Unavailable(f"{what}: the server is too slow", **fields)
    if "token request" in text or "azure cli" in text.lower():
        if status == 429 or status >= 500:
            return Unavailable(f"{what}: the credentials cannot be fetched: {status}", **fields)
        return Denied(f"{what}: there are no credentials", todo=_CREDENTIALS[scheme], **fields)
    if status:
        return _translate_status(status, f"{what}: {_reason(status, text)}", text, fields)
    if _BAD_CREDENTIALS.search(text):  # which may show a key
        todo = (
            "Check account_key= and sas_token=, or that service_account= and GOOGLE_SERVICE_ACCOUNT"
            " are the path of a key file"
        )
        return Denied(f"{what}: the credentials cannot be used", todo=todo, **fields)
    if _TLS.search(text):
        todo = "Check whether the endpoint begins with http:// or https://, and its certificate"
        return StoreError(f"{what}: TLS failed, or the server needs it", todo=todo, **fields)
    if _NOT_SENT.search(text):
        return Unavailable(
            f"{what}: the server cannot be reached", todo="Check the endpoint", **fields
        )
    if _BAD_REPLY.search(text):
        what = f"{what}: there is no valid reply, as from another kind of server"
        return Unavailable(what, outcome="unknown", **fields)
    if type(error).__name__ == "InvalidPathError" or isinstance(error, ValueError | TypeError):
        todo = "Rename or delete that object: its name has an empty part or a control character"
        return StoreError(f"{what}: {_first_line(text)}", todo=todo, **fields)
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
