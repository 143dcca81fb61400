"""A real browser for tests: Debian's Chromium, without a window and without a network."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

SCHEMES, WIDTHS = ("light", "dark"), (1280, 390)


def why_no_browser() -> str:
    """Return why there is none, or ""."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    found = shutil.which("chromium")
    return "" if found else "chromium is not installed: tests/install_chromium.sh"


@contextmanager
def chromium():
    """Start it; yields the browser."""
    from playwright.sync_api import sync_playwright

    how = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=how)
        try:
            yield browser
        finally:
            browser.close()


class OpenPage:
    """One page in a window of its own, with all that it complains of and asks for.

    Attributes:
        page: Playwright's.
        complaints: Messages of its console, and errors of its script.
        requests: URLs that it asked for, without its own.
    """

    def __init__(self, browser, file, *, scheme="light", width=1280):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, locale="en-US"
        )
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.requests.remove(file.as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()
