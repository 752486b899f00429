"""Compare `report` with a bare DuckDB pass over both logprob columns, and measure its page in a browser."""

import shutil
import tempfile
from pathlib import Path

from comparison import Comparison, in_turn, ratios
from likeness import bare_pass
from peak import Peak, can_reset
from steps import make_step, record
from tim_trace.analysis.report.report import report
from tim_trace.analysis.stats import stats
from tim_trace.tracer.recorder import Recorder

NUM_STEPS = 100
ROUNDS = 3
NAMES = ("chromium", "chromium-browser", "google-chrome")
OBSERVE = """
    window.interactions = [];
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) if (entry.interactionId) interactions.push(entry.duration);
    }).observe({type: "event", durationThreshold: 16, buffered: true});
    window.frames_ = [];
    new PerformanceObserver((list) => frames_.push(...list.getEntries().map((entry) => entry.duration)))
        .observe({type: "long-animation-frame", buffered: true});
"""
"""Script that collects the browser's own entries: time from an input to the next frame, and frames of 50 ms or more."""


def compare():
    """Measure a report of 100 million tokens, without and with stored sums: time, file size, and how it opens."""
    with tempfile.TemporaryDirectory() as folder:
        trace, summed, page = Path(folder, "trace"), Path(folder, "summed"), Path(folder, "report.html")
        with Recorder(trace) as recorder:
            for number in range(1, NUM_STEPS + 1):
                record(recorder, number, make_step(number))
        shutil.copytree(trace, summed)
        stats(summed, by="step")  # keeps its sums
        peaks = []

        def measured():
            peak = Peak() if can_reset() else None
            report(trace, output=page, force=True)
            peaks.append(peak.gained() if peak else float("nan"))

        taken = in_turn(
            ROUNDS,
            bare=lambda: bare_pass(trace),
            report=measured,
            summed=lambda: report(summed, output=Path(folder, "summed.html"), force=True),
        )
        over = "time over that of a bare pass, report"
        yield Comparison(what=over, values=ratios(taken["report"], taken["bare"]), at_most=10)
        yield Comparison(what=f"{over} with kept sums", values=ratios(taken["summed"], taken["bare"]), at_most=10)
        yield Comparison(what="peak memory of report", values=peaks, unit=" MB", at_most=2000)
        yield Comparison(what="bytes of the file", values=[page.stat().st_size / 1e6], unit=" MB", at_most=15)
        yield from _opened(page)


def _opened(page):
    """Measure opening the page, inputs and scrolling by the browser's own performance entries."""
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        return
    from playwright.sync_api import sync_playwright

    paints, inputs, frames = [], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(ROUNDS):
            shown = browser.new_page(viewport={"width": 1280, "height": 800})
            shown.add_init_script(OBSERVE)
            shown.goto(f"file://{page}")
            shown.wait_for_function("document.body.dataset.drawn")
            paints.append(shown.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            shown.wait_for_timeout(1000)
            _use(shown)
            inputs += shown.evaluate("interactions")
            frames.append(_scroll(shown))
            shown.close()
        browser.close()
    yield Comparison(what="first contentful paint", values=paints, unit=" ms", at_most=1500)
    yield Comparison(what="from an input to the next frame", values=inputs, unit=" ms", at_most=100)
    yield Comparison(what="longest frame while scrolling", values=frames, unit=" ms", at_most=100)


def _use(shown):
    """Click steps in a figure, move the slider, open sequences and change colours, as a reader would."""
    for left in (300, 500, 700, 900):
        shown.locator("#f-k3 .plot").click(position={"x": left, "y": 40})
        shown.wait_for_timeout(400)
    shown.focus("#step")
    for _ in range(5):
        shown.keyboard.press("ArrowLeft")
        shown.wait_for_timeout(300)
    for place in range(3):
        shown.locator("#sequences tbody tr").nth(place).click()
        shown.wait_for_timeout(300)
    shown.focus("#tokens-text")
    for _ in range(5):
        shown.keyboard.press("ArrowRight")
        shown.wait_for_timeout(100)
    shown.click("#theme")
    shown.wait_for_timeout(500)


def _scroll(shown):
    """Return the longest frame while scrolling the page, in ms; 50 if none was as long, as those go unreported."""
    shown.evaluate("frames_.length = 0; window.scrollTo(0, 0)")
    for _ in range(40):
        shown.mouse.wheel(0, 200)
        shown.wait_for_timeout(30)
    return max([50.0, *shown.evaluate("frames_")])
