"""A real headless Chromium, driven over WebDriver's own protocol: JSON over HTTP, so that no package is needed."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1300,1000",
)  # fmt: skip
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Browser:
    """One window: `js` runs a script in the page, `press` and `point` are the user's hands."""

    def __init__(self, address):
        self.address = address

    def ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with NO_PROXY.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, path):
        self.ask("POST", "/url", {"url": path.resolve().as_uri()})

    def js(self, script, *arguments):
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def act(self, *sources):
        self.ask("POST", "/actions", {"actions": list(sources)})

    def point(self, x, y, *, click=False):
        steps = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        steps += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}] if click else []
        self.act({"type": "pointer", "id": "mouse", "actions": steps})

    def click(self, selector, text=None):
        """Bring the first match (that contains `text`) into view and click in its middle."""
        place = self.js(
            "const found = [...document.querySelectorAll(arguments[0])]"
            ".find((e) => !arguments[1] || e.textContent.includes(arguments[1]));"
            "found.scrollIntoView({block: 'center', behavior: 'instant'}); const b = found.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]",
            selector,
            text,
        )
        self.point(*place, click=True)

    def press(self, *keys):
        names = {"right": "\ue014", "left": "\ue012", "up": "\ue013", "down": "\ue015", "escape": "\ue00c"}
        steps = [{"type": kind, "value": names[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self.act({"type": "key", "id": "keyboard", "actions": steps})

    def log(self):
        """What the page wrote to its console, errors and refused requests included."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"})]


@contextmanager
def start(profile):
    """Start a browser with an empty profile in the folder `profile`, and end it afterwards."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Without a proxy: a page that needs no network must not get any.
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    server = Browser(f"http://127.0.0.1:{port}")
    session = None
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                if server.ask("GET", "/status")["ready"]:
                    break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = server.ask("POST", "/session", {"capabilities": wanted})["sessionId"]
        yield Browser(f"{server.address}/session/{session}")
    finally:
        if session:
            server.ask("DELETE", f"/session/{session}")
        driver.terminate()
        driver.wait(30)
