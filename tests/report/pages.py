"""Read a page as a browser does, and make runs that are hard to show."""

import json
import os
import re
import threading
from html.parser import HTMLParser
from typing import NamedTuple

import numpy as np

import limpet
from limpet.format.digest import digest
from limpet.format.names import MANIFEST, Version
from limpet.format.records import Branch, encode_record
from limpet.snapshot.reader import open_snapshot
from limpet.storage.memory import MemoryStore
from tests.cli.invoke import run_cli
from tests.forging import seal, sealed_content

_VOID = {"meta", "br", "input"}
_SECTIONS = [
    "Summary", "Lineage", "Metrics", "Bytes per save", "Config", "Contents of the newest version",
    "Versions",
]  # fmt: skip


class Page(HTMLParser):
    """The tags and texts of a page, which has no script and loads nothing."""

    def __init__(self, html):
        super().__init__()
        assert html.isascii()
        self.html = html
        self.tags, self.texts, self._open = [], [], []
        self.feed(html)
        assert not self._open
        assert not {"script", "img", "iframe", "object", "embed", "base"} & {
            t for t, _ in self.tags
        }
        for tag, attributes in self.tags:
            assert not [name for name in attributes if name.startswith("on") or name == "src"]
            assert tag == "a" or "href" not in attributes
        assert "url(" not in html
        assert "@import" not in html
        assert "<tr></tr>" not in html
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.texts.append(data)

    def sections(self):
        """The text of each section, by its title."""
        parts = re.split(r"<h2>(.*?)</h2>", self.html)
        return {t: Page(_wrap(h)).text for t, h in zip(parts[1::2], parts[2::2], strict=True)}


def _wrap(html):
    return html.partition('<p class="dim">Made')[0]


def report(*arguments):
    """Make a report by the command, and check it."""
    result = run_cli("report", *arguments)
    assert result.code == 0, result
    page = Page(result.out)
    assert list(page.sections()) == _SECTIONS
    return page


class Drawing(NamedTuple):
    width: int
    height: int
    title: str
    text: str
    svg: str


def drawings(page):
    """The drawings of a page, each with its alternative text."""
    found = re.findall(
        r'<svg viewBox="0 0 (\d+) (\d+)" width="\d+" role="img">'
        r"<title>(.*?)</title><desc>(.*?)</desc>(.*?)</svg>",
        page.html,
    )
    assert len(found) == page.html.count("<svg viewBox")
    return [Drawing(int(w), int(h), *rest) for w, h, *rest in found]


def check_nothing_is_clipped(drawing):
    for attributes, x, y, label in re.findall(
        r'<text ([^>]*?)x="([^"]*)" y="([^"]*)">([^<]*)</text>', drawing.svg
    ):
        share = 1.0 if "end" in attributes else 0.0 if "start" in attributes else 0.5
        left = float(x) - share * len(label) * 6.6
        assert left >= -1
        assert left + len(label) * 6.6 <= drawing.width + 1
        assert 8 <= float(y) <= drawing.height, (label, y)
    for path in re.findall(r'class="(?:line|dots)[^"]*" d="([^"]*)"', drawing.svg):
        for x, y in re.findall(r"[ML]([^ ]+) ([0-9.e+-]+)", path):
            assert 3 <= float(x) <= drawing.width - 3
            assert 3 <= float(y) <= drawing.height


def many_versions(folder, count, branches=0, metrics=("loss",)):
    """Make a run of ``count`` versions by links to the files of one of them. Each of ``branches``
    begins at version 1, and has as many versions."""
    with limpet.Run(str(folder)).writer() as writer:
        writer.save({"x": np.arange(3)}, step=1, metrics=dict.fromkeys(metrics, 1.0))
    content = sealed_content((folder / "version_1" / MANIFEST).read_bytes())
    files = [name for name in os.listdir(folder / "version_1") if name != MANIFEST]
    for step in range(2, count + 1):
        content["step"], content["branch"] = step, 1 + step % branches if branches else 0
        version = folder / str(Version(step, content["branch"]))
        version.mkdir()
        for name in files:
            os.link(folder / "version_1" / name, version / name)
        values = {name: (i + 1) / step for i, name in enumerate(metrics)}
        content["metadata"]["dict"]["metrics"]["dict"] = values
        (version / MANIFEST).write_bytes(seal(content))
    digest_of_first = open_snapshot(str(folder / "version_1")).digest
    for number in range(1, branches + 1):
        at, reason = "2026-11-30T00:00:00+00:00", "on request"
        record = Branch(number, "version_1", digest_of_first, at, reason)
        (folder / f"branch-{number}.json").write_bytes(encode_record(record))


def make_huge(folder, nbytes=100_000_000_000):
    """Save a tensor, and replace it by one of zeros with so many bytes, in a sparse file."""
    block, count = 1 << 22, nbytes // 4
    limpet.save(folder, {"big": np.zeros(1000, np.float32), "n": 1}, step=1)
    (shard,) = folder.glob("*.safetensors")
    path = shard.with_name(shard.name.replace(".safetensors", ".index.json"))
    index = json.loads(path.read_bytes())
    start, zeros = index["header"], digest(bytes(block))
    cuts = [*range(start, start + nbytes, block), start + nbytes]
    os.truncate(shard, start + nbytes)
    index["length"], index["cuts"] = start + nbytes, cuts
    index["digests"] = [index["digests"][0], *[zeros] * (len(cuts) - 2)]
    index["digests"].append(digest(bytes(cuts[-1] - cuts[-2])))
    index["leaves"][0]["shape"] = index["leaves"][0]["boxes"][0]["sizes"] = [count]
    raw = json.dumps(index).encode()
    path.write_bytes(raw)
    content = sealed_content((folder / MANIFEST).read_bytes())
    content["shards"][0]["length"] = start + nbytes
    content["shards"][0]["index"] |= {"length": len(raw), "digest": digest(raw)}
    content["tree"]["dict"]["big"]["array"][1] = [count]
    (folder / MANIFEST).write_bytes(seal(content))


def hold(patch, name):
    """Let the calls of a method of ``MemoryStore`` wait for the event that this returns."""
    answers, call = threading.Event(), getattr(MemoryStore, name)
    patch.setattr(MemoryStore, name, lambda *arguments: answers.wait(30) and call(*arguments))
    return answers
