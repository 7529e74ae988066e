"""A headless Chromium, and the reason why there is none."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIRED_VARIABLE = "FLASH_BROWSER_TESTS"  # "required": without a browser the tests fail
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def skip_or_fail(reason: str) -> None:
    """Skip the test, or fail it where the browser tests are required."""
    if os.environ.get(REQUIRED_VARIABLE) == "required":
        pytest.fail(f"{REQUIRED_VARIABLE}=required, but {reason}")
    pytest.skip(f"{reason} (set {REQUIRED_VARIABLE}=required to make this a failure)")


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A selenium driver with a fresh profile, which keeps logs of console and network."""
    try:
        from selenium import webdriver
    except ImportError:
        skip_or_fail("selenium is not installed: pip install selenium")
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        skip_or_fail("there is no Chromium with its driver: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}", "--window-size=1500,950"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


def waiting(driver: Any, *ignored: type[Exception]) -> Any:
    """A selenium wait of 20 seconds at most, which asks often. ignored: what may be raised until
    then."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 20, poll_frequency=0.02, ignored_exceptions=ignored)


def requested_urls(driver: Any) -> list[str]:
    """Every address that was asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
