"""Emulators of cloud services: Azurite (Azure's blobs) and LocalStack (S3 with its checksums)."""

import base64
import hmac
import urllib.request
from datetime import UTC, datetime

from tests.stores.install import require
from tests.stores.servers import Daemons, S3Server, answers_http, free_port


class Azurite(Daemons):
    """The blob service of Azure.

    It writes its list of blobs when it ends by SIGTERM, and every 5 s. So ``kill`` also loses
    writes that it has confirmed: tests of what survives a kill need another server. ``account``
    and ``key`` are those that Microsoft documents for every emulator.
    """

    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, folder):
        super().__init__(folder)
        self._program = require("azurite") / "node_modules" / ".bin" / "azurite-blob"
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{self.account}"

    def start(self):
        self.resume()

    def resume(self):
        """Start again on the same data."""
        self.spawn(
            "azurite",
            *("node", str(self._program), "--silent", "--skipApiVersionCheck"),
            *("--disableTelemetry", "--location", str(self.folder / "data")),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
        )
        self.wait_until(lambda: answers_http(self.port))

    def environment(self):
        """Return the environment variables with which obstore uses this server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_ALLOW_HTTP": "true",
        }

    def create_container(self, name):
        """Create a container, which obstore cannot. Raises ``HTTPError``."""
        self._put(f"{name}?restype=container", f"{name}\nrestype:container")

    def create_empty(self, name):
        """Create an empty object ``CONTAINER/NAME``, also with a name that obstore refuses."""
        self._put(name, name, **{"x-ms-blob-type": "BlockBlob"})

    def _put(self, target, signed_target, **headers):
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers |= {"x-ms-date": date, "x-ms-version": "2021-12-02"}
        signed = "PUT" + "\n" * 12  # none of the standard headers
        signed += "".join(f"{header}:{value}\n" for header, value in headers.items())
        signed += f"/{self.account}/{self.account}/{signed_target}"
        digest = hmac.digest(base64.b64decode(self.key), signed.encode(), "sha256")
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{target}"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=30).close()


class LocalStack(S3Server):
    """S3 as LocalStack emulates it, in memory: a kill loses everything.

    Other than Ceph, it stores, returns, and verifies the checksums of S3, and honors the condition
    of CompleteMultipartUpload, though not of several at the same moment. It does not check
    signatures.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self._python = require("localstack") / "venv" / "bin" / "python"

    def start(self):
        self.spawn(
            "localstack",
            *(str(self._python), "-m", "localstack.runtime.main"),
            SERVICES="s3",
            EAGER_SERVICE_LOADING="1",
            STRICT_SERVICE_LOADING="1",
            GATEWAY_LISTEN=f"127.0.0.1:{self.port}",
            LOCALSTACK_VOLUME_DIR=str(self.folder),
            FILESYSTEM_ROOT=str(self.folder / "fs"),
            DISABLE_EVENTS="1",
            SKIP_SSL_CERT_DOWNLOAD="1",
            DNS_ADDRESS="0",
        )
        self.wait_until(lambda: answers_http(self.port))
