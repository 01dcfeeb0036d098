"""How the replies of each platform may arrive: a long body, a late body, and no usable reply."""

from contextlib import contextmanager

import pytest

from limpet.notices.aws import AwsNotice
from limpet.notices.azure import AzureNotice
from limpet.notices.gcp import GcpNotice
from limpet.notices.kubernetes import KubernetesNotice
from limpet.notices.notice import Notice, NoticeSource
from tests.notices.manual_clock import ManualClock
from tests.notices.metadata_servers import (
    FAULTS,
    AwsServer,
    AzureServer,
    GcpServer,
    KubernetesServer,
    MetadataServer,
)
from tests.notices.test_kubernetes import POD, write_certificate

NOTICES = {
    "aws": Notice("the AWS spot instance action 'terminate'", 120.0),
    "gcp": Notice("the preemption by Google Cloud", 30.0),
    "azure": Notice("the Azure scheduled event 'Preempt'", 30.0),
    "kubernetes": Notice("the deletion of pod trainer-0", 30.0),
    "kubernetes without TLS": Notice("the deletion of pod trainer-0", 30.0),
}


@contextmanager
def platform(name, folder):
    """Return a running server and the source that asks it, with one clock."""
    clock = ManualClock()
    server: MetadataServer
    source: NoticeSource
    match name:
        case "aws":
            server = AwsServer()
            source = AwsNotice(server.url, clock=clock)
        case "gcp":
            server = GcpServer()
            source = GcpNotice(server.url, clock=clock)
        case "azure":
            server = AzureServer()
            source = AzureNotice(server.url, clock=clock)
        case _:
            (folder / "token").write_text("a-token")
            (folder / "namespace").write_text("team")
            is_tls = name == "kubernetes"
            server = KubernetesServer(write_certificate(folder, "ca.crt") if is_tls else None)
            source = KubernetesNotice(POD, base_url=server.url, folder=str(folder), clock=clock)
    server.clock = clock.now
    with server:
        yield server, source


@pytest.mark.parametrize(("pause", "padding"), [(0.05, 0), (0.0, 10_000), (0.05, 10_000)])
@pytest.mark.parametrize("name", NOTICES)
def test_a_body_that_is_long_or_comes_later_is_read(name, pause, padding, tmp_path):
    """More than 4 KiB, or a body 50 ms after its header, is not in the first read of a socket."""
    with platform(name, tmp_path) as (server, source):
        server.pause, server.padding = pause, padding
        assert source.poll() is None
        server.announce()
        assert source.poll() == NOTICES[name]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NOTICES)
def test_a_fault_is_an_outage_that_ends(name, fault, tmp_path):
    with platform(name, tmp_path) as (server, source):
        assert source.poll() is None
        server.announce()
        server.fault = fault
        if name == "aws":  # its token comes before
            server.fault_paths = ("/latest/meta-data/spot",)
        with pytest.raises(OSError, match=r"https?://127"):
            source.poll()
        assert server.count("elsewhere") == 0, "a redirect is not followed"
        server.fault = None
        assert source.poll() == NOTICES[name]
