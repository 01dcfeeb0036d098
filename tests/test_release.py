"""The package as others see it: its name, its extras, and its advice on an installation."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import limpet
from limpet import sinks
from limpet.errors import LimpetError

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
