"""A store in a container of Azure Blob Storage, or in a bucket of Google, through obstore.

Terms: a *container* is what Azure calls so, or a bucket of Google. An *endpoint* is one account or
server, with the limits of its requests.

A small object is created by one PUT that never replaces another (``If-None-Match: *``; for Google,
``x-goog-if-generation-match: 0``). A large one is a stream.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, ClassVar, TypeVar

from limpet.deadline import Deadline, call_within
from limpet.errors import Denied, NotFound, StoreError, Unavailable
from limpet.settings import OBSTORE_VARIABLES, find_variables
from limpet.storage.options import (
    LONGEST_TIMEOUT,
    WEB_URL,
    BucketOptions,
    fit_timeout,
    is_web_url,
    text,
)
from limpet.storage.retry import Remote, RemoteUpload, Reply, RetryStore, Server
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    exists_error,
    part_length,
    replaced_error,
    short_read_error,
)
from limpet.text import advise_install, hide_secrets, with_article
from limpet.types import BLOCK_SIZE, MIB
from limpet.version import __version__

T = TypeVar("T")


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
        raise StoreError(f"{kind} needs the package obstore", todo=advise_install("cloud")) from e
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


# -- the tries of a store: requests and streams ---------------------------------------------------

PARALLEL_PARTS = 4
"""How many parts of one upload are sent at once."""

_CONTAINER = re.compile(r"[a-z0-9$][a-z0-9._-]{1,221}")


class CloudFolder(Remote):
    """A folder of a container, or all of it. ``statistics`` does not count parts of uploads."""

    def __init__(self, container: str, folder: str, options: CloudOptions) -> None:
        super().__init__(f"{options.scheme}://{container}", folder)
        self.container = container
        self.options = options
        shared_server(options)  # raises if obstore is missing

    @property
    def server(self) -> CloudServer:
        return shared_server(self.options)

    @property
    def traits(self) -> Traits:
        options = self.options
        return Traits(
            options.scheme,
            1,
            durable=True,
            ordered=True,
            hidden_uploads=options.hidden_uploads,
            upload_memory=6 * options.part_size + 8 * MIB,  # see CloudStream
            spread=options.spread,
        )

    def object_name(self, key: str) -> str:
        """Also refuse a key that Azure or Google would refuse or change, and one with a query: it
        may be a SAS, in a part of a URL that ``open_azure`` does not see."""
        name = super().object_name(key)
        shown = hide_secrets(name)
        is_changed = "\\" in name or any(s.endswith(".") for s in name.split("/"))
        if is_changed or shown != name or any(ord(c) < 32 or c == "\x7f" for c in name):
            raise StoreError(
                f"Invalid key {hide_secrets(key[:200])!r} for {self.url}",
                expected="no control characters, backslashes, queries (?a=b), or"
                " names that end with a dot",
                found=repr(shown),  # the folder of the store may be what is invalid
                key=hide_secrets(key),
                store=self.url,
            )
        return name

    # -- reading -------------------------------------------------------------------------------

    def stat(self, key: str) -> Stat:
        import obstore

        name = self.object_name(key)
        try:
            return _to_stat(self._send("HeadObject", "look up", key, obstore.head, name), key)
        except NotFound:  # the reply to a HEAD has no reason
            self._require_container()
            raise
        except StoreError as e:
            if isinstance(e, Denied) or e.fields.get("status") == 400:
                first = {"range": (0, 1)}
                self._send("GetObject", "look up", key, obstore.get, name, options=first)
            raise

    def _require_container(self) -> None:
        """Raise ``StoreError`` if the container is missing."""
        import obstore

        if self.root in self.server.known:
            return
        name = "limpet-looks-for-the-container"
        with suppress(Denied):  # it may be there
            self._list("", lambda client: next(iter(obstore.list(client, name)), None))
        self.server.known.add(self.root)

    def open(self, key: str, offset: int, length: int | None, tag: str) -> Reply:
        import obstore

        wanted: Any = {} if length is None else {"range": (offset, offset + length)}
        if tag:
            wanted["if_match"] = tag
        name = self.object_name(key)
        try:
            return _CloudReply(
                self, key, self._send("GetObject", "read", key, obstore.get, name, options=wanted)
            )
        except StoreError as e:
            if e.fields.get("status") == 416:
                raise short_read_error(key, self.url, offset, length or 0, 0) from None
            if e.fields.get("status") == 412:
                raise replaced_error(key, self.url) from None
            raise

    def page(
        self, folder: str, prefix: str, marker: Any, *, deep: bool, partial: bool
    ) -> tuple[Sequence[Entry], Any]:
        """See ``Remote``. obstore cannot list what an unfinished upload has sent. Azure removes it
        after 7 days; a bucket of Google needs a lifecycle rule (``docs/stores.md``)."""
        import asyncio

        import obstore

        if partial:
            return [], None
        name = (self.object_name(folder) if folder else self.prefix.rstrip("/")) or None
        start = f"{folder}/" if folder else ""
        if deep:
            pages = read = marker or _read_pages(name)
        else:

            def read(client: Any) -> Any:
                async def read_level() -> Any:  # which ends with its timeout, unlike a thread
                    level = obstore.list_with_delimiter_async(client, name)
                    return await asyncio.wait_for(level, self.deadline.seconds_left)

                return asyncio.run(read_level())

        page = self._list(folder, read)
        if page is None:
            return [], None
        found: list[Entry] = []
        if not deep:
            names = (common.rstrip("/").rpartition("/")[2] for common in page["common_prefixes"])
            found += [Entry(name, "folder") for name in names]
            pages, page = None, page["objects"]
        for stat in self._stats(page):
            found.append(Entry(stat.key.removeprefix(start), "object", stat))
        return found, pages

    def _list(self, folder: str, request: Callable[[Any], T]) -> T:
        """Return ``request(client)``, a call of obstore that sends any number of requests."""
        with translated("list", folder, self.url):
            return call_within(
                self.deadline, lambda: self._send("ListObjects", "list", folder, request)
            )

    def _stats(self, page: Any) -> Iterator[Stat]:
        """Yield the objects of a page. "Folders" of other tools are empty objects, of whose names
        obstore leaves out the slash: an empty object counts only if one has exactly its name."""
        for found in page:
            path = found["path"]
            if path.startswith(self.prefix):
                stat = _to_stat(found, path.removeprefix(self.prefix))
                with suppress(NotFound):
                    yield stat if stat.length or self._refuses(stat.key) else self.stat(stat.key)

    def _refuses(self, key: str) -> bool:
        """Return True for the key of another program that cannot be looked up."""
        try:
            self.object_name(key)
        except StoreError:
            return True
        return False

    # -- writing -------------------------------------------------------------------------------

    def create(self, key: str, data: bytes | memoryview) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        self._require_credentials("write", key)
        name = self.object_name(key)

        def put(client: Any) -> bool:
            try:
                obstore.put(client, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        # a timeout is for the whole request
        return self._send("PutObject", "write", key, put, longest=LONGEST_TIMEOUT)

    def begin(self, key: str, length: int, head: int) -> RemoteUpload | None:
        self._require_credentials("write", key)
        part_size = self.options.part_size
        if length <= part_size:
            return None
        return CloudStream(key, length, max(part_size, part_length(self.traits, length)))

    def delete(self, key: str) -> None:
        import obstore

        self._require_credentials("delete", key)
        self._send("DeleteObject", "delete", key, obstore.delete, self.object_name(key))

    def _require_credentials(self, action: str, key: str) -> None:
        """Raise ``Denied`` if the store has no credentials, and can only read. For a write to
        Google, obstore would look for some all the same."""
        if self.options.anonymous:
            raise Denied(
                f"Cannot {action} {key} in {self.url}: it was opened with anonymous=True",
                expected="a store with credentials",
                todo="Open it without this option",
                key=key,
                store=self.url,
            )

    # -- requests ------------------------------------------------------------------------------

    def _send(
        self,
        operation: str,
        action: str,
        key: str,
        request: Callable[..., T],
        *arguments: Any,
        longest: int = 15,
        **options: Any,
    ) -> T:
        """Return ``request(client, ...)``, which sends one request; ``longest``: the client's
        longest timeout, in seconds."""
        server = self.server
        try:
            with translated(action, key, self.url):
                client = server.client(self.container, self.deadline.seconds_left, longest)
                server.throttle.count(operation)
                result = request(client, *arguments, **options)
        except Denied:
            server.forget_clients()  # they keep credentials, and that there were none
            raise
        server.known.add(self.root)
        return result


def _to_stat(found: Any, key: str) -> Stat:
    return Stat(key, int(found["size"]), int(found["last_modified"].timestamp()))


class _CloudReply(Reply):
    """The chunks of a reply."""

    def __init__(self, folder: CloudFolder, key: str, reply: Any) -> None:
        length = reply.range[1] - reply.range[0]
        super().__init__(key, folder.url, length, reply.meta["e_tag"] or "")
        self._chunks, self._rest = reply.stream(min_chunk_size=MIB), memoryview(b"")

    def receive(self, most: int, deadline: Deadline) -> memoryview:
        if not self._rest:
            with translated("read", self._key, self._url):
                self._rest = memoryview(next(self._chunks, b""))
        data, self._rest = self._rest[:most], self._rest[most:]
        return data


def _read_pages(folder: str | None) -> Callable[[Any], Any]:
    """Return a function that returns the next page of a listing, or None.

    After a failure, or with another client, it asks for names behind those that have arrived. Azure
    includes the first of them, and other servers ignore that.
    """
    import obstore

    position: str | None = None
    known: tuple[Any, Iterator[Any] | None] = None, None

    def read(client: Any) -> Any:
        nonlocal position, known
        owner, stream = known
        known = None, None  # until this succeeds
        if stream is None or client is not owner:
            stream = iter(obstore.list(client, folder, offset=position, chunk_size=1000))
        page = next(stream, None)
        known = client, stream
        if page and position is not None:
            page = [found for found in page if found["path"] > position]
        if page:
            position = page[-1]["path"]
        return page

    return read


class CloudStream:
    """Writes a large object by obstore's writer, in parts of ``part`` bytes. Each call runs in a
    thread, to end by the deadline. Parts of an upload that fails stay, and nobody sees them.

    The writer repeats a part that fails, because nobody else has the bytes, without ``Retry-After``
    and the throttle, in pauses of up to 5 s. So its failures are final.
    """

    def __init__(self, key: str, length: int, part: int) -> None:
        self._key, self._length, self._part = key, length, part
        self._first: list[bytes] = []  # until the server has begun the upload
        self._position = 0  # the end of these
        self._writer: Any = None
        self._seconds = 0.0  # for which a part is repeated
        self._is_checked = False

    def write(self, folder: CloudFolder, offset: int, views: Sequence[memoryview]) -> None:
        """Copy the bytes, because the writer refers to them until they are sent."""
        pieces = [
            bytes(view[start : start + BLOCK_SIZE])
            for view in views
            for start in range(0, len(view), BLOCK_SIZE)
        ]
        if self._writer is not None:
            for piece in pieces:
                self._final(folder, "write", lambda piece=piece: self._writer.write(piece))  # type: ignore[misc]
            return
        if offset == self._position:  # otherwise, this is another try to begin
            self._first += pieces
            self._position += sum(map(len, pieces))
        if self._position > self._part:
            self._begin(folder)

    def _begin(self, folder: CloudFolder) -> None:
        """Get a writer with more than one part, so that the upload has begun: obstore does not
        repeat Google's request for that if the connection breaks."""
        import obstore

        self._seconds = folder.deadline.seconds_left
        name = folder.object_name(self._key)

        def begin() -> Any:
            client = folder.server.streaming_client(folder.container, self._seconds)
            writer = obstore.open_writer(
                client, name, buffer_size=self._part, max_concurrency=PARALLEL_PARTS
            )
            for piece in self._first:
                writer.write(piece)
            return writer

        self._writer = self._bounded(folder, "write", begin)
        self._first = []

    def commit(self, folder: CloudFolder) -> None:
        """Complete the object, unless the key is taken. Azure accepts that once, and obstore gets
        an error if it repeats it. So after a failure, an object of the right length is this one."""
        if self._writer is None:
            self._begin(folder)
        if not self._is_checked:
            if self._length_found(folder) is not None:
                raise exists_error(self._key, folder.url)
            self._is_checked = True
        try:
            self._final(folder, "complete", self._writer.close)
        except StoreError as e:
            is_unknown = isinstance(e, Unavailable)
            try:
                is_visible = self._length_found(folder) == self._length
            except StoreError:  # that of the completion counts
                is_visible, is_unknown = False, True
            if not is_visible:
                raise e.with_advice(**({"outcome": "unknown"} if is_unknown else {})) from None

    def abort(self, folder: CloudFolder) -> None:
        self._writer, self._first = None, []

    def _length_found(self, folder: CloudFolder) -> int | None:
        with suppress(NotFound):
            return folder.stat(self._key).length
        return None

    def _final(self, folder: CloudFolder, action: str, function: Callable[[], object]) -> None:
        """Call the writer, which repeats its requests itself."""
        try:
            self._bounded(folder, action, function)
        except Unavailable as e:
            advice = f"Gave up after repeating it for up to {self._seconds:g} s. Check the network"
            raise e.with_advice(f"{advice} and the server, then try again", is_final=True) from None

    def _bounded(self, folder: CloudFolder, action: str, function: Callable[[], T]) -> T:
        with translated(action, self._key, folder.url):
            return call_within(folder.deadline, function)


def open_azure(url: str, **options: Any) -> RetryStore:
    """Return the store at ``az://CONTAINER/folder``, with ``AzureOptions``. Characters such as
    ``%`` and ``+`` stand for themselves."""
    return _open(url, AzureOptions.from_mapping(options))


def open_google(url: str, **options: Any) -> RetryStore:
    """Return the store at ``gs://BUCKET/folder``, with ``GoogleOptions``. Experimental: it is
    tested on Ceph, not on Google."""
    return _open(url, GoogleOptions.from_mapping(options))


def _open(url: str, options: CloudOptions) -> RetryStore:
    container, _, folder = url.removeprefix(f"{options.scheme}://").partition("/")
    if not _CONTAINER.fullmatch(container):
        raise StoreError(
            "The URL does not name a container and a folder",
            expected=f"{options.scheme}://CONTAINER/folder, with a name of at least two lowercase"
            " letters, digits, dots, hyphens, and underscores",
            found=repr(url),
            todo="The account and other options are not part of the URL: see docs/stores.md",
        )
    return RetryStore(CloudFolder(container, folder.rstrip("/"), options), options.timeout)


# -- the errors of obstore ------------------------------------------------------------------------

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
