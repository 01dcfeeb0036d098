"""Which platforms this process runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping

from limpet.notices.aws import AwsNotice
from limpet.notices.azure import AzureNotice
from limpet.notices.gcp import GcpNotice
from limpet.notices.kubernetes import SERVICE_ACCOUNT, KubernetesNotice
from limpet.notices.metadata import LINK_LOCAL
from limpet.notices.notice import NoticeSource
from limpet.notices.slurm import SlurmNotice
from limpet.settings import platform_variables

_AWS_IPV6 = "http://[fd00:ec2::254]"
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_MAX_BYTES = 4096


def detect_sources(
    environ: Mapping[str, str] | None = None,
    dmi_root: str = "/sys/class/dmi/id",
    service_account: str = SERVICE_ACCOUNT,
) -> list[NoticeSource]:
    """Return the sources of the platforms on which this process runs.

    It sends no request: it reads environment variables and some files of the kernel. A cloud's
    source, which sends requests when it is polled, is returned only if the firmware of this machine
    (``dmi_root``) or a variable of the cloud's own libraries names that cloud:

    - AWS: ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` and ``..._ENDPOINT_MODE`` (the address);
      ``AWS_EC2_METADATA_DISABLED=true``: no source.
    - Google Cloud: ``GCE_METADATA_HOST`` or ``GCE_METADATA_IP`` (the address, without ``http://``).
    - Azure: none; it is found by the firmware.

    All ranks of a job hear of a notice from any of them. Therefore, only rank 0 watches the time
    limit of Slurm, and only the first rank of a host (``LOCAL_RANK``) its cloud and its pod: Azure
    answers few requests per second.

    Raises ``LimpetError`` if an address in a variable is invalid.

    Sources: the AWS guide, "Detect whether a host is an EC2 instance"; ``detect_gce_residency`` of
    google-auth; ``ChassisAssetTag`` of cloud-init.
    """
    variables = platform_variables(environ)
    sources: list[NoticeSource] = []
    if variables.get("SLURM_JOB_ID", "").isdecimal() and variables.get("RANK", "0") == "0":
        sources.append(SlurmNotice(variables))
    if variables.get("LOCAL_RANK", "0") == "0":
        sources += _detect_clouds(variables, dmi_root)
        has_name = variables.get("POD_NAME") or variables.get("HOSTNAME")
        token = os.path.join(service_account, "token")  # without it, SIGTERM remains
        if variables.get("KUBERNETES_SERVICE_HOST") and has_name and os.path.isfile(token):
            sources.append(KubernetesNotice(variables, folder=service_account))
    return sources


def _detect_clouds(variables: Mapping[str, str], dmi_root: str) -> list[NoticeSource]:
    sources: list[NoticeSource] = []
    aws = variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    is_disabled = variables.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if not is_disabled and (aws or _is_ec2(dmi_root)):
        is_ipv6 = variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
        sources.append(AwsNotice(aws or (_AWS_IPV6 if is_ipv6 else LINK_LOCAL)))
    gcp = variables.get("GCE_METADATA_HOST") or variables.get("GCE_METADATA_IP")
    if gcp or _read(dmi_root, "product_name").startswith("Google Compute Engine"):
        address = gcp or LINK_LOCAL
        sources.append(GcpNotice(address if "://" in address else f"http://{address}"))
    if _read(dmi_root, "chassis_asset_tag") == _AZURE_TAG:
        sources.append(AzureNotice())
    return sources


def _is_ec2(dmi_root: str) -> bool:
    """Return True on an instance of EC2, which is on Nitro, on bare metal, or on Xen."""
    if "Amazon EC2" in (_read(dmi_root, "sys_vendor"), _read(dmi_root, "bios_vendor")):
        return True
    if _read(dmi_root, "bios_version").endswith(".amazon"):
        return True
    # these two are readable by root only
    uuid, serial = (_read(dmi_root, name).lower() for name in ("product_uuid", "product_serial"))
    return uuid.startswith("ec2") and uuid == serial


def _read(folder: str, name: str) -> str:
    """Return what a file of the firmware says, or nothing."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
