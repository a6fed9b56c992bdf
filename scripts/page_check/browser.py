"""A headless Chromium, driven by the DevTools protocol over two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The longest wait for an answer.
WAIT_SECONDS = 60


def found():
    """The path of a browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one tab at a time."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()
        command = [found(), "--headless", "--remote-debugging-pipe", f"--user-data-dir={self.folder}/profile"]
        # Without a network, so that a request of the browser's own cannot be taken for one of a page.
        command += ["--disable-background-networking", "--no-first-run", "--disable-gpu"]
        # The sandbox refuses root.
        command += ["--no-sandbox"] if os.geteuid() == 0 else []

        def pipes():
            # The protocol's pipes are descriptors 3 and 4. Copies first: one of ours may be 3.
            ends = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False, preexec_fn=pipes
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.unread, self.events, self.number = b"", [], 0
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(WAIT_SECONDS)

    def _message(self, deadline):
        while b"\0" not in self.unread:
            if not select.select([self.back], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self.back, 1 << 16)
            if not piece:
                raise EOFError("the browser is gone")
            self.unread += piece
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, session=None, **parameters):
        """The result of a call. Events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def wait(self, session, method):
        """Waits for an event of a tab."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(event.get("sessionId") == session and event["method"] == method for event in self.events):
            message = self._message(deadline)
            self.events += [message] if "method" in message else []

    def open(self, path, width=1280, dark=False, scripts=True):
        return Tab(self, path, width, dark, scripts)


class Tab:
    """A page in a fresh tab; closed at the end of `with`."""

    def __init__(self, browser, path, width, dark, scripts):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=path.resolve().as_uri())
        browser.wait(self.session, "Page.loadEventFired")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.events.clear()

    def call(self, method, **parameters):
        return self.browser.call(method, session=self.session, **parameters)

    def events(self):
        """What has happened in the tab so far."""
        return [event for event in self.browser.events if event.get("sessionId") == self.session]

    def value(self, expression):
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=f"({expression})", returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def key(self, name, shift=False):
        codes = {"Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}
        common = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def pointer(self, x, y, kind="mouseMoved"):
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def screenshot(self, path):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self):
        data = self.call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)["data"]
        return base64.b64decode(data)
