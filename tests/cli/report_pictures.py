"""Take the pictures of docs/report.md: the page of a recorded run, in a real browser.

.venv/bin/python -m tests.cli.record_training /home/ada/runs/gpt
TZ=Europe/Paris .venv/bin/python -m tests.cli.report_pictures /home/ada/runs/gpt docs/images
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.cli.browser import SCHEMES, OpenPage, chromium
from trainckpt.cli.report_page import write_page
from trainckpt.inspect.run_report import read_report

MARGIN = 16


def main(run: str, folder: str) -> None:
    """Take them."""
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        page = Path(place) / "report.html"
        write_page(read_report(run), page)
        for scheme in SCHEMES:
            with OpenPage(browser, page, scheme=scheme) as shown:
                _take(shown, "header", "#buckets", Path(folder) / f"report-{scheme}.png")
        with OpenPage(browser, page, scheme="dark", width=390) as shown:
            _take(shown, "header", "#timeline", Path(folder) / "report-narrow-dark.png")
        with OpenPage(browser, page) as shown:
            _take(shown, "section:has(#stages)", "#sizes", Path(folder) / "report-saves.png")
            _take(
                shown, "section:has(#loss)", "#loss + .scroll", Path(folder) / "report-advice.png"
            )


def _take(shown: OpenPage, first: str, last: str, file: Path) -> None:
    """Take a picture from one element to another, as wide as the window."""
    top = shown.page.locator(first).bounding_box()["y"] - MARGIN
    box = shown.page.locator(last).bounding_box()
    width = shown.page.viewport_size["width"]
    height = box["y"] + box["height"] + MARGIN - max(top, 0)
    clip = {"x": 0, "y": max(top, 0), "width": width, "height": height}
    data = shown.page.screenshot(full_page=True, clip=clip)
    Image.open(io.BytesIO(data)).convert("RGB").save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
