"""A headless Chromium from the distribution, driven over the DevTools protocol through a socket: no new dependency."""

import itertools
import json
import shutil
import socket
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
PROBLEMS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
SECONDS = 60  # of silence


def executable():
    """The path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser. `requests`: every address it asked for; `problems`: console messages and exceptions."""

    def __init__(self, folder, width=1500, height=1000):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(SECONDS)
        command = f'exec "$0" "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}'  # the two pipes that it asks for
        flags = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, executable(), *flags],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.rest = b""
        self.numbers = itertools.count(1)
        self.session = None
        self.requests = []
        self.problems = []
        self.loaded = 0
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        """End the browser."""
        self.socket.close()  # it ends when its pipes do
        self.process.wait(SECONDS)

    def call(self, method, **parameters):
        """The result of a DevTools command."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.socket.sendall(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _message(self):
        while b"\0" not in self.rest:
            piece = self.socket.recv(1 << 20)
            assert piece, "the browser has ended"
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        method = message.get("method")
        parameters = message.get("params")
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded += 1
        elif method in PROBLEMS:
            self.problems.append(parameters)
        assert method != "Page.javascriptDialogOpening", "a script of a name has run"
        return message

    def open(self, file):
        """Load a local file and wait for it."""
        before = self.loaded
        self.requests.clear()
        self.problems.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while self.loaded == before:
            self._message()

    def run(self, script):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key, code=0, text=""):
        """Press and release a key, as a person does."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)
