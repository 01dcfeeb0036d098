"""The metadata servers of a host, and the sources with which its first rank watches them.

A host asks all clouds at once, so that any of them can announce its end.
"""

from contextlib import ExitStack

from limpet.notices.azure import AzureNotice
from limpet.notices.kubernetes import KubernetesNotice
from tests.notices.metadata_servers import AwsServer, AzureServer, GcpServer, KubernetesServer

AWS, GCP, AZURE, POD = CLOUDS = ("AWS", "Google Cloud", "Azure", "Kubernetes")

AWS_SECONDS, AZURE_SECONDS, POD_SECONDS = 20.0, 20.0, 30.0
"""The seconds that a notice leaves. AWS is polled every 5 s, Azure every 2 s, a pod every 10 s."""

GCP_SECONDS = 32.0
"""30 seconds from the moment at which a source sees it, and it is polled every 2 s."""


class Clouds:
    """The metadata servers of one host."""

    def __init__(self):
        self.aws, self.gcp, self.azure = AwsServer(), GcpServer(), AzureServer()
        self.pod = KubernetesServer()
        self.is_announced = False
        self._closing = ExitStack()

    def __enter__(self):
        for server in (self.aws, self.gcp, self.azure, self.pod):
            self._closing.enter_context(server)
        return self

    def __exit__(self, *_):
        self._closing.close()

    @property
    def urls(self):
        """The URL of each server, by the name of the cloud."""
        return dict(zip(CLOUDS, (s.url for s in (self.aws, self.gcp, self.azure, self.pod)),
                        strict=True))  # fmt: skip

    def announce(self, cloud):
        """Announce the end of the host. Return the seconds until then."""
        self.is_announced = True
        if cloud == AWS:
            self.aws.announce(seconds=AWS_SECONDS)
            return AWS_SECONDS
        if cloud == GCP:
            self.gcp.announce()
            return GCP_SECONDS
        if cloud == AZURE:
            self.azure.announce(seconds=AZURE_SECONDS)
            return AZURE_SECONDS
        self.pod.announce(POD_SECONDS)
        return POD_SECONDS


def variables(urls):
    """Return the environment variables that name the servers of the clouds that have such."""
    return {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": urls[AWS],
        "GCE_METADATA_HOST": urls[GCP].removeprefix("http://"),
    }


def other_sources(urls, folder):
    """Return the sources of the clouds that no environment variable names. ``folder``: a new one
    for the service account of the pod."""
    folder.mkdir()
    (folder / "token").write_text("a-token")
    (folder / "namespace").write_text("team")
    pod = KubernetesNotice({"POD_NAME": "trainer-0"}, base_url=urls[POD], folder=str(folder))
    return [AzureNotice(urls[AZURE]), pod]
