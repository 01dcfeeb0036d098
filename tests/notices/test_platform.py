"""Which platforms are detected, from real strings of their firmware."""

import socket
from urllib.parse import urlsplit

import pytest

from limpet.errors import LimpetError
from limpet.notices.platform import detect_sources
from tests.notices.metadata_servers import AwsServer, GcpServer

NITRO = {
    "sys_vendor": "Amazon EC2",
    "product_name": "p5.48xlarge",
    "bios_vendor": "Amazon EC2",
    "bios_version": "1.0",
    "board_asset_tag": "i-0123456789abcdef0",
    "chassis_asset_tag": "Amazon EC2",
}
XEN = {
    "sys_vendor": "Xen",
    "product_name": "HVM domU",
    "bios_vendor": "Xen",
    "bios_version": "4.2.amazon",
    "chassis_asset_tag": "",
}
XEN_AS_ROOT = {
    "sys_vendor": "Xen",
    "bios_version": "4.11",
    "product_uuid": "EC2CEFAC-DCE1-EED5-4E48-83AD3EF51BFB",
    "product_serial": "ec2cefac-dce1-eed5-4e48-83ad3ef51bfb",
}
GCE = {
    "sys_vendor": "Google",
    "product_name": "Google Compute Engine",
    "bios_vendor": "Google",
    "chassis_asset_tag": "",
}
AZURE = {
    "sys_vendor": "Microsoft Corporation",
    "product_name": "Virtual Machine",
    "bios_vendor": "American Megatrends Inc.",
    "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
}
HYPER_V = {**AZURE, "chassis_asset_tag": "4829-9093-2210-3345-1123-6720-11"}
CHROMEBOOK = {"sys_vendor": "Google", "product_name": "Kohaku", "bios_vendor": "coreboot"}
XEN_ELSEWHERE = {**XEN, "bios_version": "4.17.3"}
UUID_BY_CHANCE = {**XEN_AS_ROOT, "product_serial": "ABC-123"}
QEMU = {"sys_vendor": "QEMU", "product_name": "Standard PC (Q35 + ICH9, 2009)"}


def write_dmi(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return str(folder)


def names(environ, folder, files=None):
    """The classes of the sources, on a machine with this firmware and a service account."""
    account = folder / "account"
    account.mkdir()
    (account / "token").write_text("a-token")
    root = write_dmi(folder, files or {})
    return [type(source).__name__ for source in detect_sources(environ, root, str(account))]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (NITRO, ["AwsNotice"]),
        (XEN, ["AwsNotice"]),
        (XEN_AS_ROOT, ["AwsNotice"]),
        (GCE, ["GcpNotice"]),
        (AZURE, ["AzureNotice"]),
        *((files, []) for files in (HYPER_V, CHROMEBOOK, XEN_ELSEWHERE, UUID_BY_CHANCE, QEMU, {})),
    ],
)
def test_clouds_by_their_firmware(tmp_path, files, expected):
    assert names({}, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}, ["AwsNotice"]),
        ({"GCE_METADATA_HOST": "127.0.0.1:1"}, ["GcpNotice"]),
        ({"GCE_METADATA_IP": "127.0.0.1"}, ["GcpNotice"]),
        ({"SLURM_JOB_ID": "5"}, ["SlurmNotice"]),
        ({"SLURM_JOB_ID": "5", "RANK": "0"}, ["SlurmNotice"]),
        ({"SLURM_JOB_ID": "5", "RANK": "3"}, []),
        ({"SLURM_JOB_ID": ""}, []),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "a"}, ["KubernetesNotice"]),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, []),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "a", "LOCAL_RANK": "1"}, []),
        ({"HOSTNAME": "a", "AWS_REGION": "eu-west-1", "GOOGLE_CLOUD_PROJECT": "p"}, []),
    ],
)
def test_platforms_by_the_environment(tmp_path, environ, expected):
    assert names(environ, tmp_path) == expected


@pytest.mark.parametrize(("value", "expected"), [("true", []), ("TRUE", []), ("no", ["AwsNotice"])])
def test_aws_can_be_turned_off(tmp_path, value, expected):
    assert names({"AWS_EC2_METADATA_DISABLED": value}, tmp_path, NITRO) == expected


def test_several_platforms_at_once(tmp_path):
    environ = {"SLURM_JOB_ID": "5", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "a"}
    assert names(environ, tmp_path, NITRO) == ["SlurmNotice", "AwsNotice", "KubernetesNotice"]


@pytest.mark.parametrize("files", [NITRO, GCE, AZURE])
def test_only_the_first_rank_of_a_host_watches_its_cloud(tmp_path, files):
    root = write_dmi(tmp_path, files)
    counts = [
        len(detect_sources({"LOCAL_RANK": str(n), "RANK": "8"}, root, root)) for n in range(3)
    ]
    assert counts == [1, 0, 0]


def test_a_pod_without_a_service_account_has_only_the_signal(tmp_path):
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "a"}
    assert detect_sources(environ, str(tmp_path), str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("environ", "files", "address"),
    [
        ({}, NITRO, "169.254.169.254"),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}, NITRO, "fd00:ec2::254"),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.9:5/"}, NITRO, "127.0.0.9"),
        ({}, GCE, "169.254.169.254"),
        ({"GCE_METADATA_HOST": "127.0.0.9:5"}, GCE, "127.0.0.9"),
        ({"GCE_METADATA_HOST": "http://127.0.0.9:5"}, GCE, "127.0.0.9"),
        ({}, AZURE, "169.254.169.254"),
    ],
)
def test_the_addresses_of_the_servers(tmp_path, environ, files, address):
    """The addresses of the clouds are only compared: no test sends a request there."""
    (source,) = detect_sources(environ, write_dmi(tmp_path, files), str(tmp_path))
    assert urlsplit(source._url).hostname == address


def test_the_servers_in_the_environment_are_asked(tmp_path):
    with AwsServer() as aws, GcpServer() as gcp:
        aws.announce()
        gcp.announce()
        environ = {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": aws.url,
            "GCE_METADATA_HOST": gcp.url.removeprefix("http://"),
        }
        sources = detect_sources(environ, str(tmp_path), str(tmp_path))
        assert all(source.poll() is not None for source in sources)
        assert len(sources) == 2


def test_an_invalid_address_in_the_environment_is_refused(tmp_path):
    environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "169.254.169.254"}
    with pytest.raises(LimpetError, match="Invalid address of a metadata server"):
        detect_sources(environ, str(tmp_path), str(tmp_path))


def test_detection_opens_no_connection(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert names({"SLURM_JOB_ID": "5"}, tmp_path, {**NITRO, **GCE}) != []
