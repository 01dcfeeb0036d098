"""The deletion of a pod, from an API server with TLS and a service account."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from limpet.errors import LimpetError
from limpet.notices.kubernetes import KubernetesNotice
from limpet.notices.metadata import fetch
from limpet.notices.notice import Notice
from tests.notices.metadata_servers import KubernetesServer

POD = {"HOSTNAME": "trainer-0"}


def write_certificate(folder, name):
    """Write a certificate for 127.0.0.1 to ``name``, and return the context of its server."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / name, folder / "key")
    return context


@pytest.fixture
def account(tmp_path):
    """The folder of a service account."""
    (tmp_path / "token").write_text("a-token\n")
    (tmp_path / "namespace").write_text("team")
    return tmp_path


@pytest.fixture
def server(account, clock):
    with KubernetesServer(write_certificate(account, "ca.crt")) as running:
        running.clock = clock.now
        yield running


def make(server, account, **variables):
    host, _, port = server.url.removeprefix("https://").partition(":")
    api = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT_HTTPS": port}
    return KubernetesNotice({**POD, **api, **variables}, folder=str(account))


def test_a_pod_that_is_deleted(server, account, clock):
    source = make(server, account)
    assert source.poll() is None
    # only the metadata, from the cache of the server
    assert server.requests == [("GET", "/api/v1/namespaces/team/pods/trainer-0?resourceVersion=0")]
    assert server.headers[0]["Accept"].startswith("application/json;as=PartialObjectMetadata;")
    server.announce(seconds=45)
    assert source.poll() == Notice("the deletion of pod trainer-0", 45.0)
    clock.advance(40)
    assert source.poll() == Notice("the deletion of pod trainer-0", 5.0)
    clock.advance(40)
    assert source.poll() == Notice("the deletion of pod trainer-0", 0.0)


def test_a_deletion_without_a_time_of_the_server_is_still_a_notice(server, account):
    server.announce()
    server.has_date = False
    assert make(server, account).poll() == Notice("the deletion of pod trainer-0", None)


def test_the_names_may_come_from_the_downward_api(server, account):
    (account / "namespace").unlink()
    names = {"HOSTNAME": "node-7", "POD_NAME": "trainer-0", "POD_NAMESPACE": "team"}
    server.announce()
    assert make(server, account, **names).poll() is not None


def test_a_pod_that_may_not_be_read_is_not_asked_for_again(server, account):
    server.allowed = False
    source = make(server, account)
    for _ in range(3):
        with pytest.raises(PermissionError, match="may not read pod trainer-0 in namespace team"):
            source.poll()
    assert len(server.requests) == 1


def test_a_token_that_was_replaced_is_read_again(server, account):
    source = make(server, account)
    server.token = "another-token"
    server.announce()
    with pytest.raises(PermissionError, match="refuses the token"):
        source.poll()
    (account / "token").write_text("another-token")
    assert source.poll() is not None


def test_a_name_that_is_not_that_of_the_pod(server, account):
    with pytest.raises(FileNotFoundError, match=r"There is no pod node-7 .*Set POD_NAME"):
        make(server, account, HOSTNAME="node-7").poll()


@pytest.mark.parametrize("text", ["", "a\nb: c", "\u00e9"])
def test_a_damaged_token_is_an_outage(server, account, text):
    (account / "token").write_text(text)
    with pytest.raises(OSError, match="token is empty or damaged"):
        make(server, account).poll()
    assert server.requests == []


def test_a_server_with_another_certificate_receives_no_token(server, account):
    source = make(server, account)
    write_certificate(account, "ca.crt")
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        source.poll()
    assert server.requests == []


def test_without_a_certificate_those_of_the_system_count(server):
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(server.url, {})
    assert server.requests == []


def test_the_token_is_sent_only_over_tls_or_to_this_machine(account):
    with pytest.raises(LimpetError, match="Cannot send the token of the service account"):
        KubernetesNotice(POD, base_url="http://10.0.0.1", folder=str(account))
    with KubernetesServer() as proxy:
        source = KubernetesNotice(POD, base_url=proxy.url, folder=str(account))
        assert source.poll() is None


@pytest.mark.parametrize("variables", [{}, POD, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
def test_outside_a_pod_it_is_refused(variables):
    with pytest.raises(LimpetError, match="Cannot watch the pod"):
        KubernetesNotice(variables)
