"""The package as others see it: its name, its extras, and its advice on an installation."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import limpet
from limpet import sinks
from limpet.cli import VERBS, cli
from limpet.errors import LimpetError
from tests import release
from tests.docs import man

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
FOLDERS = (".github", "docs", "examples", "src", "tests")
WORDS = limpet.tables.Table("words", 4, optimizer=limpet.tables.SGD(0.1))
OTHERS = {"torchmetrics"}
"""What documents tell a user to install beside Limpet, which has no extra for it."""


def documents():
    """Return the text of every file that may advise a user, by its path in the repository."""
    paths = [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    texts = [p for p in paths if p.suffix in {".md", ".py", ".yml", ".yaml", ".sh", ".cff"}]
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in texts}


def wrong_names(text):
    """Return what a text says to install that is neither Limpet nor an extra that it has."""
    text = text.replace("\\", "")
    names = re.findall(r"""pip install +["']*([^\s"'`)]+)""", text)
    listed = re.findall(r"""(?:["'`]\.|limpet)\[([^\]{"']+)\]["'`]""", text)
    wrong = [n for n in names if n.partition("[")[0] not in {"limpet", "."} | OTHERS]
    return wrong + [e for group in listed for e in group.split(",") if e not in EXTRAS]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('pip install "limpet[torch,cloud]"', []),
        ("`pip install '.[ray]'`; `\".[hdfs]\"`", []),
        ("pip install other", ["other"]),
        ("(pip install other[torch])", ["other[torch]"]),
        ('pip install "limpet[torch,dev]"', ["dev"]),
        ('in a checkout, `".[zoo]"`', ["zoo"]),
    ],
)
def test_a_wrong_name_is_found(text, wrong):
    assert wrong_names(text) == wrong


def test_no_message_document_or_test_says_to_install_another_name():
    texts = documents()
    assert len(texts) > 500
    del texts["tests/test_release.py"]
    assert {name: wrong for name, text in texts.items() if (wrong := wrong_names(text))} == {}


def test_one_function_makes_the_advice_for_all_extras():
    sources = {name: text for name, text in documents().items() if name.startswith("src/")}
    assert [n for n, text in sources.items() if "pip install" in text] == ["src/limpet/text.py"]
    named = set(re.findall(r'advise_install\("([\w-]+)"\)', "\n".join(sources.values())))
    assert {"torch", "cloud", "hdfs", "prometheus", "ray"} <= named <= {*EXTRAS}


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("boto3", "cloud", lambda: limpet.open_store("s3://bucket/x")),
        ("obstore", "cloud", lambda: limpet.open_store("az://container/x")),
        ("hdfs_native", "hdfs", lambda: limpet.open_store("hdfs://host:8020/x")),
        ("prometheus_client", "prometheus", sinks.Prometheus),
        ("ray", "ray", lambda: limpet.tables.Servers([WORDS], engine="ray")),
    ],
)
def test_the_error_without_a_package_names_the_extra_that_installs_it(
    module, extra, call, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LimpetError) as caught:
        call()
    assert str(caught.value).endswith(f'. Install it: pip install "limpet[{extra}]".')
    packages = [re.split(r"[\[><=]", p)[0].replace("-", "_") for p in EXTRAS[extra]]
    assert module in packages


def test_users_see_only_the_extras_for_users():
    integrations = (ROOT / "src/limpet/integrations").glob("*.py")
    frameworks = {p.stem.replace("_", "-") for p in integrations if p.stem != "frameworks"}
    frameworks -= {"--init--", "dcp", "dcp-names"}  # the framework dcp is part of torch
    others = {"torch", "cloud", "hdfs", "prometheus", "ray", "tensorboard", "wandb", "mlflow"}
    assert {*EXTRAS} == others | frameworks
    assert {"bench", "dev", "zoo"} <= {*PROJECT["dependency-groups"]}


def test_every_link_to_the_repository_has_its_address():
    address = PROJECT["project"]["urls"]["Source"]
    owner = address.rsplit("/", 1)[0]
    texts = documents() | {"pyproject.toml": (ROOT / "pyproject.toml").read_text()}
    del texts["tests/test_release.py"]
    found = {n: re.findall(rf"{owner}\b[^\s\"')>]*", text) for n, text in texts.items()}
    assert len(found["pyproject.toml"]) >= 5
    assert all(f"{link}/".startswith(f"{address}/") for links in found.values() for link in links)


def test_the_changelog_has_a_section_of_this_version_of_at_most_80_lines():
    text = (ROOT / "CHANGELOG.md").read_text()
    start, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert start.rstrip().endswith("<!-- towncrier release notes start -->")
    assert sections[0].startswith(f"{limpet.__version__} (")
    assert sections[-1].startswith("0.1.0 (")
    assert sections[-1].count("\n") <= 80


def test_a_fragment_of_the_changelog_has_a_type_that_towncrier_knows():
    types = "|".join(t["directory"] for t in PROJECT["tool"]["towncrier"]["type"])
    names = {p.name for p in (ROOT / "changes").iterdir()} - {"README.md"}
    assert not [n for n in names if not re.fullmatch(rf"(\d+|\+[\w-]+)\.({types})\.md", n)]
    explained = (ROOT / "changes/README.md").read_text()
    assert all(f"`{name}`" in explained for name in types.split("|"))


def test_what_the_code_host_reads_agrees_with_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == limpet.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Source"]
    pythons = {c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if "Python ::" in c}
    steps = load_workflow("ci")["jobs"]["ci"]["steps"]
    (tested,) = [s["with"]["python-version"].split() for s in steps if "setup-python" in str(s)]
    assert {*tested} == pythons
    assert tested[-1] == min(pythons, key=lambda p: int(p.partition(".")[2]))


def load_workflow(name):
    return yaml.load((ROOT / f".github/workflows/{name}.yml").read_text(), yaml.BaseLoader)


def test_only_a_tag_publishes_and_only_after_the_checks_of_that_tag():
    workflow = load_workflow("release")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert jobs["ci"] == {"uses": "./.github/workflows/ci.yml"}
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert 'make release-check TAG="$GITHUB_REF_NAME"' in commands
    assert jobs["publish"]["needs"] == ["ci", "build"]
    assert jobs["announce"]["needs"] == "publish"


def test_a_workflow_may_do_only_what_its_jobs_need():
    for name in ("ci", "release"):
        workflow = load_workflow(name)
        assert workflow["permissions"] == {"contents": "read"}
        extra = {n: j["permissions"] for n, j in workflow["jobs"].items() if "permissions" in j}
        more = {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}
        assert extra == (more if name == "release" else {})
        text = (ROOT / f".github/workflows/{name}.yml").read_text()
        assert "secrets." not in text
        assert re.findall(r"uses: (?!\./|\S+@[0-9a-f]{40} # v\d)", text) == []
        # what a branch or a tag is called must not become code
        assert not re.search(r"run:.*\$\{\{", text)


def test_a_report_of_a_bug_must_have_the_versions_and_the_listing():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    required = {f["id"]: f for f in form["body"] if f.get("validations", {}).get("required")}
    assert "limpet ls RUN --json" in required["ls"]["attributes"]["description"]
    assert "limpet --version" in required["versions"]["attributes"]["description"]


DATED = "# Changes\n\n## 0.2.0 (2027-01-31)\n\nText\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "fragments", "message"),
    [
        ("0.2.0", DATED, [], "0.2.0 is not the tag of version 0.2.0"),
        ("v0.2.1", DATED, [], "v0.2.1 is not the tag of version 0.2.0"),
        ("v0.2.0.dev1", DATED, [], "is not the tag"),
        ("v0.2.0", DATED.replace("2027-01-31", "unreleased"), [], "no section '## 0.2.0 "),
        ("v0.2.0", DATED.replace("0.2.0", "0x2.0"), [], "no section '## 0.2.0 "),
        ("v0.2.0", DATED, ["7.added.md"], "7.added.md"),
    ],
)
def test_a_wrong_tag_is_not_released(tag, changelog, fragments, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        release.check_tag(tag, "0.2.0", changelog, fragments)


def test_the_tag_of_the_version_is_released():
    release.check_tag("v0.2.0", "0.2.0", DATED, [])


README = "Metadata-Version: 2.4\n" + "\n".join(
    f"[{i}](https://github.com/limpet-checkpoints/limpet/blob/v{limpet.__version__}/docs/ranks.md#a)"
    for i in range(24)
)


def pack(folder, name, files):
    """Return a distribution with these files, as an sdist or as a wheel."""
    path = folder / name
    if name.endswith(".whl"):
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
        return path
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            (folder / "content").write_text(text)
            archive.add(folder / "content", f"limpet-{limpet.__version__}/{file}")
    return path


@pytest.mark.parametrize(
    ("sdist", "wheel", "readme", "message"),
    [
        (["a.py"], ["limpet/a.py"], README, "the sdist lacks {'tests/b.py'}"),
        (["a.py", "tests/b.py"], ["limpet/a.py", "tests/b.py"], README, "files outside limpet/"),
        (["a.py", "tests/b.py"], ["limpet_x/a.py"], README, "files outside limpet/"),
        (["a.py", "tests/b.py"], [], f"{README} [x](docs/none.md)", "links without a target"),
        (["a.py", "tests/b.py"], [], f"{README} [x](http://x)", "links without a target"),
        (["a.py", "tests/b.py"], [], README[:22], "links without a target"),
        # the action that publishes the package would refuse it
        (["a.py", "tests/b.py"], [], README.replace("2.4", "2.5", 1), "a new format: Metadata-V"),
    ],
)
def test_a_package_with_wrong_contents_is_not_released(
    sdist, wheel, readme, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(release, "WORK", tmp_path)
    metadata = {f"limpet-{limpet.__version__}.dist-info/METADATA": readme}
    files = pack(tmp_path, "x.tar.gz", dict.fromkeys(sdist, ""))
    built = pack(tmp_path, "x.whl", dict.fromkeys(wheel, "") | metadata)
    with pytest.raises(SystemExit, match=re.escape(message)):
        release.check_contents(files, built, ["a.py", "tests/b.py"])


def test_a_package_that_is_too_large_is_not_released(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "WORK", tmp_path)
    metadata = {f"limpet-{limpet.__version__}.dist-info/METADATA": README}
    files = pack(tmp_path, "x.tar.gz", {"a.py": ""})
    for size, name in ((900_000, None), (1_000_001, "x.whl is too large")):
        built = pack(tmp_path, "x.whl", metadata | {"limpet/a.py": "x" * size})
        if name is None:
            release.check_contents(files, built, ["a.py"])
        else:
            with pytest.raises(SystemExit, match=name):
                release.check_contents(files, built, ["a.py"])


def test_the_manual_pages_have_every_command_and_option():
    pages = man.pages()
    assert pages.keys() == {"limpet.1", *(f"limpet-{verb}.1" for verb in VERBS)}
    for verb, summary in VERBS.items():
        page = pages[f"limpet-{verb}.1"].replace("\\-", "-")
        context = cli.make_context("limpet", [verb], resilient_parsing=True)
        options = [o for p in cli.get_command(context, verb).params for o in p.opts if o[0] == "-"]
        assert [o for o in [*options, "--help", summary.rstrip(".")] if o not in page] == []
        assert summary in pages["limpet.1"].replace("\\-", "-")
    assert man.escape(".x\\y\n'z") == "\\&.x\\ey\n\\&'z"
    if shutil.which("groff"):
        for name, text in pages.items():
            command = ["groff", "-man", "-Tutf8", "-wall", "-"]
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
            assert done.stderr == "", name
