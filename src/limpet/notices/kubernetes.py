"""Notices of Kubernetes: the deletion of the pod."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from limpet.errors import LimpetError
from limpet.notices.metadata import Reply, fetch, server_url
from limpet.notices.notice import BoundedSource, Notice
from limpet.settings import platform_variables

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts the token of a service account, its namespace, and the certificate."""

# only the metadata of the pod: some 2 KB, whereas the status may have over 100 KB
_ACCEPT = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json"


class _Metadata(msgspec.Struct, rename="camel"):
    deletion_timestamp: str | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata


_POD = msgspec.json.Decoder(_Pod)


class KubernetesNotice(BoundedSource):
    """A notice when this pod is deleted: by a drain, an eviction, a preemption, or a user.

    SIGTERM, which is a source of its own, comes then, too. The API server says more: how many
    seconds are left (``deletionTimestamp``), even while a ``preStop`` hook delays the signal, or if
    a shell as process 1 does not forward it. Each poll is one cheap request, of cached metadata.

    It requires a service account whose token is mounted, and that may ``get`` ``pods`` in its
    namespace. Without that permission, it asks no more, and each poll raises an error that says so.
    The pod is ``POD_NAME`` or ``HOSTNAME``, in ``POD_NAMESPACE`` or that of the service account.

    ``variables``: the environment variables, by default those of this process. ``base_url``: the
    address of the API server, by default that in ``KUBERNETES_SERVICE_HOST``; the token is sent
    only over TLS, or to this machine. ``folder``: that of the service account. ``check`` raises
    ``OSError`` if the API server refuses, or does not answer as documented.

    Source: https://kubernetes.io/docs/, "Termination of Pods" and "Accessing the Kubernetes API
    from a Pod".
    """

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        base_url: str | None = None,
        folder: str = SERVICE_ACCOUNT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LimpetError`` outside a pod, and for an invalid value."""
        super().__init__("the API server of Kubernetes", 10.0, clock)
        variables = platform_variables() if variables is None else variables
        self._pod = variables.get("POD_NAME") or variables.get("HOSTNAME", "")
        self._namespace = variables.get("POD_NAMESPACE", "")
        self._url = server_url(base_url or _api_server(variables))
        self._folder = folder
        if not self._pod:
            raise LimpetError("Cannot watch the pod without its name in POD_NAME or HOSTNAME")
        url = urlsplit(self._url)
        if url.scheme == "http" and url.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise LimpetError(
                f"Cannot send the token of the service account to {self._url}, without https://"
            )
        self._is_tls = url.scheme == "https"
        self._refusal: str | None = None

    def check(self) -> Notice | None:
        if self._refusal is not None:
            raise PermissionError(self._refusal)
        reply = self._get_pod()
        deleted_at = reply.decode(_POD).metadata.deletion_timestamp
        if deleted_at is None:
            return None
        seconds: float | None = None
        with suppress(OSError):  # the deletion is certain, even if its time is unclear
            seconds = reply.seconds_until(deleted_at)
        return Notice(f"the deletion of pod {self._pod}", seconds)

    def _get_pod(self) -> Reply:
        namespace = self._namespace or self._read_file("namespace")
        # the token is replaced about once per hour
        headers = {"Authorization": f"Bearer {self._read_file('token')}", "Accept": _ACCEPT}
        url = f"{self._url}/api/v1/namespaces/{namespace}/pods/{self._pod}?resourceVersion=0"
        context = None
        if self._is_tls:
            import ssl

            context = ssl.create_default_context(cafile=os.path.join(self._folder, "ca.crt"))
        reply = fetch(url, headers, allow=(200, 401, 403, 404), context=context)
        if reply.status == 403:
            self._refusal = (
                f"The service account may not read pod {self._pod} in namespace {namespace}, so "
                "that only SIGTERM announces its deletion. To know how many seconds are left, "
                "allow it to get pods; otherwise ignore this"
            )
            raise PermissionError(self._refusal)
        if reply.status == 404:
            raise FileNotFoundError(
                f"There is no pod {self._pod} in namespace {namespace}. Set POD_NAME and "
                "POD_NAMESPACE from metadata.name and metadata.namespace (fieldRef)"
            )
        if reply.status == 401:
            raise PermissionError(f"{reply.url} refuses the token of the service account")
        return reply

    def _read_file(self, name: str) -> str:
        path = os.path.join(self._folder, name)
        with open(path, "rb") as file:
            text = file.read(64 * 1024).decode("ascii", errors="replace").strip()
        if not text or not text.isprintable() or not text.isascii():
            raise OSError(f"{path} is empty or damaged")
        return text


def _api_server(variables: Mapping[str, str]) -> str:
    """Return the address of the API server. Raises ``LimpetError`` outside a pod."""
    host = variables.get("KUBERNETES_SERVICE_HOST", "")
    port = variables.get("KUBERNETES_SERVICE_PORT_HTTPS") or "443"
    if not host:
        raise LimpetError(
            "Cannot watch the pod outside of one, without an address in KUBERNETES_SERVICE_HOST"
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
