"""Builds the site, and checks every link and anchor of its HTML: ``make site``.

The documents are written for a checkout. They are copied to build/docs, where a link to a file that
is no page of the site becomes a link to the code host, at the tag of this version. Zensical makes
build/site of them. This runs in the environment of Zensical: it needs the standard library only.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<file>[\w./-]+\.md)?\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")

MOVED = {
    "README.md": "index.md",
    "docs/README.md": "documents.md",
    "docs/decisions": "decisions/index.md",
}
"""Where the site has these files. It has the others where docs/ or build/ have them."""


def stage(root):
    """Write the pages of the site, and the other files of docs/, into build/docs."""
    host = code_host(root)
    files = [root / "README.md", *root.glob("docs/**/*.*"), *root.glob("build/reference/*.md")]
    names = [path.relative_to(root).as_posix() for path in files]
    pages = {name: name.partition("/")[2] for name in names} | MOVED

    shutil.rmtree(root / "build/docs", ignore_errors=True)
    for name, page in pages.items():
        target = root / "build/docs" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():
            target.write_text(contents(root / name))
        elif name.endswith(".md"):
            target.write_text(rewrite((root / name).read_text(), name, pages, root, host))
        else:
            shutil.copy(root / name, target)


def code_host(root):
    """Return the address of the files of this version."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    version = re.search(r'"(\d.*)"', (root / "src/limpet/version.py").read_text())
    return f"{urls['Source']}/blob/v{version[1]}"


def rewrite(text, name, pages, root, host):
    """Return the document ``name`` with the links, and the titles of scripts, as the site needs."""

    def link(match):
        text, path, anchor = (found or "" for found in match.groups())
        target = os.path.normpath(os.path.join(os.path.dirname(name), path))
        if target in pages:
            path = os.path.relpath(pages[target], os.path.dirname(pages[name]))
            text = text and title(root / target)
        elif (root / target).exists():
            path = f"{host}/{target}"
        return f"{text}]({path}{anchor})"  # Zensical reports a link to nothing

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    parts[1::2] = [
        re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', p, flags=re.M) for p in parts[1::2]
    ]
    return "".join(parts)


def contents(folder):
    """Return a page that lists those of a folder."""
    pages = [f"- [{title(page)}]({page.name})" for page in sorted(folder.glob("*.md"))]
    return "\n".join([f"# {title(folder)}", "", *pages, ""])


def title(path):
    """Return the title of a page, or the name of a folder."""
    if path.is_dir():
        return path.name.capitalize()
    return path.read_text().partition("\n")[0].lstrip("# ")


class Page(HTMLParser):
    """The anchors, links, and parts of an HTML page."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.parts = {""}, [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found.get("id"), found.get("name")}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag != "link" or found.get("rel") not in ("canonical", "prev", "next"):
            self.parts += [found[name] for name in ("src", "href") if name in found]


def problems(site):
    """Return what is wrong in a built site: links to nothing, and parts from other hosts."""
    read = cache(Page)
    found = []
    for page in sorted(site.rglob("*.html")):
        for url in read(page).links + read(page).parts:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if url in read(page).parts and parts.scheme != "data":
                    found.append(f"{page}: loads {url}")
                continue
            folder = site if parts.path.startswith("/") else page.parent
            target = folder / unquote(parts.path).lstrip("/") if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{page}: no such page: {url}")
            elif (
                target.suffix == ".html"
                and unquote(parts.fragment) not in read(target.resolve()).anchors
            ):
                found.append(f"{page}: no such anchor: {url}")
    return found


def build(root):
    """Build and check the site of the checkout ``root``. Raises SystemExit with what is wrong."""
    stage(root)
    config = str(root / "mkdocs.yml")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", config]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)
    if found := problems(root / "build/site"):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    build(Path(sys.argv[1] if sys.argv[1:] else ".").resolve())
