"""Make the pictures of the operator's page and the recording of its demo.

    python docs/images/make_page_pictures.py demo-output            (four minutes; needs Chromium)

The demo runs as a user starts it, `deformer-stream demo --page`. A browser looks at it, opens an incident and labels
it. `page-demo.gif` is the recording, and `page-*.png` are single pages on a wide screen and a phone, light and dark.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
GIF_SIZE, GIF_COLORS, PICTURE_COLORS = {"width": 1000, "height": 640}, 96, 256
PATIENCE_SECONDS = 300.0


class Recording:
    """Screenshots that become the frames of a GIF."""

    def __init__(self, tab: Page) -> None:
        self._tab = tab
        self._frames: list[Image.Image] = []
        self._milliseconds: list[int] = []

    def add(self, milliseconds: int) -> None:
        """Take a screenshot that is shown for this time."""
        image = Image.open(io.BytesIO(self._tab.screenshot())).convert("RGB")
        self._frames.append(image.quantize(GIF_COLORS, kmeans=2, dither=Image.Dither.NONE))
        self._milliseconds.append(milliseconds)

    def save(self, path: Path) -> None:
        """Write the GIF."""
        first, *others = self._frames
        first.save(
            path, save_all=True, append_images=others, duration=self._milliseconds, loop=0, optimize=True, disposal=1
        )


def start_demo(output: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the demo, and return its process and the address of its page."""
    command = [sys.executable, "-m", "deformer_stream.cli.main", "demo", "--page", "--output", str(output)]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "TZ": "UTC"}
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("The operator's page: "):
            return demo, line.split(": ", 1)[1].strip()
    raise SystemExit("the demo has ended without a page")


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the demo did not get so far in five minutes")
        time.sleep(0.3)


def record(tab: Page, url: str) -> None:
    """Record the demo from its start until an incident is labelled."""
    tab.goto(url)
    recording = Recording(tab)
    for share in (5, 30, 60, 90):
        wait_for(lambda share=share: _get_progress(tab) >= share)  # type: ignore[misc]
        recording.add(900)
    wait_for(lambda: "twelve simulated pumps, live" in tab.locator("#banners").inner_text())
    shown = ""
    started_at = time.monotonic()
    while "Fleet" not in shown and time.monotonic() - started_at < 150:
        titles = " ".join(tab.locator("#live > .rows .title").all_inner_texts())
        if titles != shown:
            shown = titles
            tab.wait_for_timeout(700)
            recording.add(1100)
        time.sleep(0.3)
    tab.wait_for_timeout(9000)
    recording.add(1600)
    tab.get_by_role("link", name="pump-07").first.click()
    tab.wait_for_selector("#decision")
    tab.wait_for_timeout(800)
    recording.add(1800)
    tab.mouse.wheel(0, 420)
    tab.wait_for_timeout(500)
    recording.add(1800)
    tab.mouse.wheel(0, -420)
    tab.get_by_label("Name of the fault").fill("one phase is weak")
    recording.add(900)
    tab.get_by_role("button", name="Real fault").click()
    tab.wait_for_selector(".decided")
    tab.wait_for_timeout(500)
    recording.add(1600)
    tab.locator(".back a").first.click()
    tab.wait_for_timeout(800)
    recording.add(2500)
    recording.save(HERE / "page-demo.gif")


def _get_progress(tab: Page) -> float:
    """Return how much of the training is done in per cent; 100 after it."""
    progress = tab.locator("#banners progress")
    if "trains" not in tab.locator("#banners").inner_text():
        return 100.0 if progress.count() else 0.0
    return float(progress.get_attribute("value") or 0)


def take_pictures(browser: Browser, url: str) -> None:
    """Take pictures of the open incidents and of one incident, wide and on a phone, light and dark."""
    for scheme in ("light", "dark"):
        for name, size in (("wide", WIDE), ("phone", PHONE)):
            context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1)
            tab = context.new_page()
            tab.goto(url)
            tab.wait_for_timeout(1500)
            _save(tab, f"page-open-{name}-{scheme}.png")
            tab.get_by_role("link", name="pump-03").first.click()
            tab.wait_for_selector("#decision")
            tab.wait_for_timeout(1000)
            _save(tab, f"page-incident-{name}-{scheme}.png")
            context.close()


def _save(tab: Page, name: str) -> None:
    """Write a screenshot of the window with few colours."""
    image = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
    image.quantize(PICTURE_COLORS, kmeans=2, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


def main() -> None:
    """Run the demo, and write the pictures next to this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the demo's tables and model")
    arguments = parser.parse_args()
    demo, url = start_demo(arguments.output)
    try:
        with sync_playwright() as playwright:
            path = os.environ.get("DEFORMER_TEST_CHROMIUM") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            record(browser.new_context(viewport=GIF_SIZE).new_page(), url)
            take_pictures(browser, url)
            browser.close()
    finally:
        demo.terminate()
        demo.wait()


if __name__ == "__main__":
    main()
