"""A headless Chromium, driven through the WebDriver protocol of chromedriver."""

import base64
import json
import re
import subprocess
import urllib.request

OPTIONS = [
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
    "disable-background-networking", "disable-component-update", "disable-sync",
]  # fmt: skip


class Browser:
    """A browser with one window, as a context manager. ``profile`` is a new, empty folder."""

    def __init__(self, profile):
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=-1, text=True)
        ports = (re.search(r"successfully on port (\d+)", line) for line in self._driver.stdout)
        port = next(found[1] for found in ports if found)
        self._session = f"http://127.0.0.1:{port}/session"
        chromium = {"args": [f"--{name}" for name in OPTIONS] + [f"--user-data-dir={profile}"]}
        wanted = {
            "goog:chromeOptions": chromium,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self._call("", capabilities={"alwaysMatch": wanted})
        self._session += f"/{session['sessionId']}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._call("", method="DELETE")
        finally:
            self._driver.terminate()
            self._driver.communicate()

    def _call(self, path, method="POST", **body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._session + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command, **parameters):
        """Run a command of the DevTools protocol, and return its result."""
        return self._call("/goog/cdp/execute", cmd=command, params=parameters)

    def show(self, url, width, height=900, theme="light"):
        """Load a page into a window of this size, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)
        self._call("/url", url=url)

    def run(self, script):
        """Run JavaScript in the page, and return what it returns."""
        return self._call("/execute/sync", script=script, args=[])

    def write(self, text):
        """Press the keys of a text."""
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])

    def screenshot(self):
        """Return what the window shows, as a PNG file."""
        return base64.b64decode(self.devtools("Page.captureScreenshot")["data"])

    def messages(self):
        """Return the messages in the console since the last call."""
        return [entry["message"] for entry in self._call("/se/log", type="browser")]

    def requests(self):
        """Return the URLs that were requested since the last call."""
        log = self._call("/se/log", type="performance")
        events = [json.loads(entry["message"])["message"] for entry in log]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]
