"""The recipes for Kubernetes and Slurm are consistent, and valid for the schedulers' validators."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from limpet.cli import cli
from limpet.cli.output import parse_duration
from limpet.notices.exit_status import GIVE_UP, SAVED
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sh"))
KUBERNETES = ["1.31", kubernetes_validate.latest_version()]
"""The first version in which podFailurePolicy is stable, and the newest one that is known."""


def names(path):
    return path.stem


def documents(manifest):
    return list(yaml.safe_load_all(manifest.read_text()))


def job_of(manifest):
    (job,) = (d for d in documents(manifest) if d["kind"] == "Job")
    return job


def test_there_are_recipes():
    assert [names(p) for p in MANIFESTS] == ["host-path", "one-node", "several-nodes"]
    assert [names(p) for p in SCRIPTS] == ["one-node", "several-nodes"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=names)
def test_kubernetes_accepts_the_manifest(manifest, version):
    for document in documents(manifest):
        kubernetes_validate.validate(document, version, strict=True)


def grace_of(command):
    """The seconds of ``--grace`` in a command line of ``limpet run``, which must be valid."""
    assert command[:2] == ["limpet", "run"]
    verb = cli.get_command(cli.make_context("limpet", ["--help"], resilient_parsing=True), "run")
    context = verb.make_context("run", command[2:])
    assert context.params["command"][0] == "torchrun"
    return float(context.params["grace"])


@pytest.mark.parametrize("manifest", MANIFESTS, ids=names)
def test_the_job_reacts_to_the_exit_codes(manifest):
    """What the API server checks beyond the schema, and what the codes mean."""
    spec = job_of(manifest)["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy requires it"
    (container,) = pod["containers"]
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        on = rule.get("onExitCodes")
        if on is not None:
            assert (on["containerName"], on["operator"]) == (container["name"], "In")
            actions |= dict.fromkeys(on["values"], rule["action"])
    assert actions == {SAVED: "Ignore", GIVE_UP: "FailJob"}
    assert spec["backoffLimit"] > 0, "1 and 76 are counted"
    grace = grace_of([*container["command"], *container["args"]])
    assert pod["terminationGracePeriodSeconds"] - grace >= 5
    mounts = {m["name"] for m in container["volumeMounts"]}
    assert mounts == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=names)
def test_the_names_in_a_manifest_refer_to_each_other(manifest):
    job = job_of(manifest)
    spec = job["spec"]["template"]["spec"]
    claims = {d["metadata"]["name"] for d in documents(manifest) if d["kind"].endswith("Claim")}
    used = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if len(v) == 2
            and "persistentVolumeClaim" in v}  # fmt: skip
    assert used == claims
    paths = [v["hostPath"] for v in spec["volumes"] if "hostPath" in v]
    assert bool(paths) == (manifest.stem == "host-path")
    assert all(p["type"] == "Directory" and spec["nodeSelector"] for p in paths)
    for service in (d for d in documents(manifest) if d["kind"] == "Service"):
        assert service["metadata"]["name"] == spec["subdomain"]
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        nodes = job["spec"]["completions"]
        args = spec["containers"][0]["args"]
        assert job["spec"]["parallelism"] == nodes
        assert f"--nnodes={nodes}" in args
        assert any(a.startswith("--rdzv-endpoint=training-0.training:") for a in args)


def shellcheck(script):
    command = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([command, script], capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_shellcheck_accepts_the_script(script):
    assert shellcheck(script) == ""


needs_sbatch = pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="needs sbatch (Debian: slurm-client)"
)


def sbatch(script, folder):
    """What sbatch says about a script. It checks the options before it looks for a controller."""
    configuration = folder / "slurm.conf"
    configuration.write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=2\n"
        "AuthType=auth/none\nCredType=cred/none\nGresTypes=gpu\n"
    )
    done = subprocess.run(
        ["sbatch", "--test-only", script], capture_output=True, text=True, check=False,
        timeout=60, env={**os.environ, "SLURM_CONF": str(configuration)},
    )  # fmt: skip
    return done.stderr


@pytest.mark.slow
@needs_sbatch
@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_sbatch_accepts_the_options(script, tmp_path):
    assert "Unable to contact slurm controller" in sbatch(script, tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_slurm_gives_more_time_than_the_grace(script):
    text = script.read_text()
    signal_at = re.search(r"--signal=B:TERM@(\d+)", text)
    grace = re.search(r"limpet run --grace (\w+) --", text)
    context = cli.make_context("limpet", ["--help"], resilient_parsing=True)
    seconds = parse_duration(context, cli.params[0], grace[1])
    # the script must still requeue the job before Slurm's own SIGTERM
    assert int(signal_at[1]) - seconds >= 30


# Commands in place of Slurm's. ``srun`` and ``limpet`` run until a file or a signal says how
# they end.
FAKE_TRAINING = """#!/bin/bash
trap 'echo TERM >> "$LOG"; exit_now=1' TERM
echo up >> "$LOG"
until [ -n "${exit_now:-}" ] || [ -e "$END" ]; do sleep 0.01; done
exit "$CODE"
"""
FAKE_SCONTROL = """#!/bin/bash
case "$1" in
hostnames | show) echo node1 ;;
*) echo "$@" >> "$LOG" ;;
esac
"""


@pytest.fixture
def cluster(tmp_path):
    """The environment of a job on a cluster whose commands are scripts."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (
        ("srun", FAKE_TRAINING), ("limpet", FAKE_TRAINING), ("scontrol", FAKE_SCONTROL)
    ):  # fmt: skip
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"),
        "END": str(tmp_path / "end"), "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[1-4]",
        "SLURM_JOB_NUM_NODES": "4",
    }  # fmt: skip


def read_log(environment):
    log = Path(environment["LOG"])
    return log.read_text().split("\n")[:-1] if log.exists() else []


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, 0, True), (75, 500, True), (76, 0, True), (76, 20, False), (93, 0, False), (1, 0, False),
     (0, 0, False)],
)  # fmt: skip
@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_the_script_requeues_the_job(script, code, restarts, requeued, stop, cluster):
    cluster |= {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts)}
    with subprocess.Popen(["bash", script], env=cluster, stderr=subprocess.PIPE) as batch:
        try:
            wait_until(lambda: "up" in read_log(cluster), 60)
            if stop:
                batch.send_signal(signal.SIGTERM)
            else:
                Path(cluster["END"]).touch()
            assert batch.wait(60) == code
            assert batch.stderr.read() == b""
        finally:
            batch.kill()
            Path(cluster["END"]).touch()  # so that nothing is left if the test fails
    assert read_log(cluster) == ["up"] + ["TERM"] * stop + ["requeue 42"] * requeued
