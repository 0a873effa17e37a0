"""A real Chromium, that `tests/conftest.py` starts once. No test is here."""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator

import pytest


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage"
)


class Browser:
    """A real Chromium, of which a test has one page. `expected`: what its log may
    complain of, as a regular expression."""

    def __init__(self, driver):
        self.driver = driver
        self.expected = None

    def open(self, url, width=1440, height=900, dark=False):
        self.resize(width, height, dark)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(url)

    def resize(self, width, height=900, dark=False):
        said = {"width": width, "height": height, "deviceScaleFactor": 1}
        do = self.driver.execute_cdp_cmd
        said["mobile"] = width < 500
        do("Emulation.setDeviceMetricsOverride", said)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        do("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def until(self, script, *args):
        """What a script returns, once that is true."""
        end = time.monotonic() + 600
        while not (found := self.run(script, *args)):
            assert time.monotonic() < end, (script, self.text(), self.problems())
            time.sleep(0.02)
        return found

    def press(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver, duration=1).send_keys(*keys).perform()

    def text(self):
        return self.run("return document.body.innerText")

    def problems(self):
        said = [row["message"] for row in self.driver.get_log("browser")]
        return [x for x in said if not (self.expected and re.search(self.expected, x))]


@contextlib.contextmanager
def started(factory) -> Iterator[Browser]:
    """Chromium, with a profile in a new directory. Skips the test where it is not."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and its driver are not here")
    pytest.importorskip("selenium.webdriver")
    from selenium.common.exceptions import WebDriverException

    # Its driver waits for it for a minute, which a busy machine may take.
    for left in reversed(range(5)):
        try:
            driver = _started(factory.mktemp("chromium"))
            break
        except WebDriverException:
            if not left:
                raise
    yield Browser(driver)
    driver.quit()


def _started(profile):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*_FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
