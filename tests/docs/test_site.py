"""The site as built by ``make site``: it shows what a checkout shows, and a browser finds its way.

``make test-site`` runs these tests. It leaves the screenshots in build/screenshots.
"""

import re
import shutil
import threading
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from markdown_it import MarkdownIt

from limpet.version import __version__
from tests.docs.browser import Browser
from tests.docs.site import problems
from tests.docs.test_docs import ROOT
from tests.waiting import run_process, wait_until

pytestmark = pytest.mark.site

SITE = ROOT / "build/site"
PAGES = {path.relative_to(ROOT / "build/docs") for path in (ROOT / "build/docs").rglob("*.md")}


def html_of(page):
    """Return the HTML file of a Markdown page."""
    return SITE / (page.parent if page.stem == "index" else page.with_suffix("")) / "index.html"


BLOCKS = {"h1", "h2", "h3", "ul", "ol", "li", "pre", "table", "tr", "strong", "em", "code"}


class Blocks(HTMLParser):
    """Counts the blocks of HTML."""

    def __init__(self, text):
        super().__init__()
        self.found = Counter()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in BLOCKS:
            self.found[tag] += 1


def test_the_site_shows_the_blocks_that_a_checkout_shows():
    """A code host has CommonMark. The Markdown of the site has other rules for nested lists."""
    markdown = MarkdownIt("commonmark").enable("table")
    assert len(PAGES) > 50
    for page in PAGES:
        article = re.search("<article.*</article>", html_of(page).read_text(), re.DOTALL)[0]
        source = markdown.render((ROOT / "build/docs" / page).read_text())
        assert Blocks(article).found == Blocks(source).found, page


@pytest.fixture
def checkout(tmp_path):
    """A checkout with two documents."""
    for name in ("pyproject.toml", "src/limpet/version.py", "docs/site.css"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "README.md").write_text("# Limpet\n\n## Install\n\n[one](docs/one.md#a-part)\n")
    (tmp_path / "docs/decisions").mkdir()
    (tmp_path / "docs/decisions/0001-a.md").write_text("# 0001: A\n\nThe reason.\n")
    (tmp_path / "docs/README.md").write_text(
        "# Documentation\n\n[README](../README.md#install), [one.md](one.md), [why](decisions/),"
        " [code](../src/limpet/version.py)\n\n```text a.txt\n[x](one.md)\n```\n"
    )
    (tmp_path / "docs/one.md").write_text("# One `thing`\n\n## A part\n\nA text.\n")
    return tmp_path


def build(checkout):
    python = ROOT / ".venv-site/bin/python"
    return run_process([python, "-m", "tests.docs.site", checkout], 60, cwd=ROOT)


def test_links_between_documents_and_to_the_repository(checkout):
    done = build(checkout)
    assert done.returncode == 0, done
    page = (checkout / "build/site/documents/index.html").read_text()
    assert '<a href="../#install">README</a>' in page
    assert '<a href="../one/">One <code>thing</code></a>' in page
    assert '<a href="../decisions/">why</a>' in page
    assert f"/limpet/blob/v{__version__}/src/limpet/version.py" in page
    assert '<span class="filename">a.txt</span>' in page
    assert "[x](one.md)" in page
    assert (
        '<a href="0001-a/">0001: A</a>'
        in (checkout / "build/site/decisions/index.html").read_text()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a](two.md)", "page does not exist"),
        ("[a](../src/two.py)", "no such page: ../../src/two.py"),
        ("[a](one.md#no-part)", "anchor does not exist"),
        ("[a](#no-part)", "anchor does not exist"),
        ('<a href="one.md#no-part">a</a>', "anchor does not exist"),
    ],
)
def test_the_build_fails_for_a_broken_link(checkout, text, message):
    with (checkout / "docs/README.md").open("a") as file:
        file.write(f"\n{text}\n")
    done = build(checkout)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_what_a_built_page_must_not_have(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/index.html").write_text('<h1 id="here"><a name="there">A</a></h1>')
    good = '<a href="a/#here">a</a> <a href="/a/?h=x#there">b</a> <a href="https://b.example">c</a>'
    bad = {
        '<a href="b/">b</a>': "no such page: b/",
        '<a href="/b/">b</a>': "no such page: /b/",
        '<a href="a/#gone">a</a>': "no such anchor: a/#gone",
        '<a href="#gone">a</a>': "no such anchor: #gone",
        '<img src="b.png">': "no such page: b.png",
        '<script src="//b.example/b.js"></script>': "loads //b.example/b.js",
        '<link rel="stylesheet" href="https://b.example/c">': "loads https://b.example/c",
    }
    page = tmp_path / "index.html"
    page.write_text(good)
    assert problems(tmp_path) == []
    page.write_text(good + "".join(bad))
    assert problems(tmp_path) == [f"{page}: {problem}" for problem in bad.values()]


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(url, tmp_path_factory):
    """A browser, whose pages may report no error and request nothing from another host."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
        requested = [u for u in found.requests() if u.startswith("http")]
        assert requested
        assert [u for u in requested if not u.startswith(url)] == []
        assert found.messages() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["", "preemption/", "reference/limpet/"])
def test_screenshots(browser, url, page, width, theme):
    browser.show(url + page, width, theme=theme)
    folder = ROOT / "build/screenshots"
    folder.mkdir(exist_ok=True)
    name = page.strip("/").replace("/", "-") or "index"
    (folder / f"{name}-{width}-{theme}.png").write_bytes(browser.screenshot())
    assert browser.run("return document.documentElement.scrollWidth") <= width
    color = browser.run("return getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", color)[:3])
    assert (red + green + blue > 600) if theme == "light" else (red + green + blue < 150), color


def test_search_finds_an_exit_code(browser, url):
    """The field is in a shadow tree of the only element that has one."""
    browser.show(url, 1280)
    browser.run("document.querySelector('.md-search__button').click()")
    tree = "[...document.querySelectorAll('*')].find(e => e.shadowRoot)?.shadowRoot"
    wait_until(lambda: browser.run(f"return {tree}?.activeElement?.tagName") == "INPUT")
    browser.write("exit code 75")

    def links():
        return browser.run(f"return [...{tree}.querySelectorAll('a')].map(a => a.href)")

    wait_until(links, shown=lambda: browser.run(f"return {tree}.innerHTML"))
    found = [re.sub(r"\?[^#]*", "", link.removeprefix(url)) for link in links()]
    assert "preemption/#exit-codes" in found[:3], found
    assert "errors/#preempted" in found[:8], found
