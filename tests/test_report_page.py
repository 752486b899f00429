"""The page in a real Chromium: it draws, it answers, it fetches nothing, and a model's words stay words.

They need Debian's package `chromium`, or another Chromium that CHROMIUM names; `make test` installs it where it can.
"""

import os
import re
import shutil
from functools import cache

import pytest
from builders import tim_trace
from playwright.sync_api import sync_playwright
from reported import NUM_STEPS, ROWS, make_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium, or set CHROMIUM")

QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Gives the page of a name: of the run, of it beside another, of one pass alone, and of nothing at all."""
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "run": {},
        "other": {"num_steps": 14},
        "one-pass": {"num_steps": 3, "passes": ("rollout",)},
        "empty": {"num_steps": 0},
    }

    @cache
    def trace(name):
        return make_run(folder / name, **runs[name])

    @cache
    def page(name):
        traces = map(trace, ("run", "other") if name == "two" else (name,))
        done = tim_trace("report", *traces, "-o", folder / f"{name}.html")
        assert done.code == 0, done.stderr
        return folder / f"{name}.html"

    return page


class Opened:
    """A page, and everything that it said, threw or asked for."""

    def __init__(self, browser, path, *, size=(1280, 800), scheme="light", link="", init=""):
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, offline=True
        )
        self.page = self.context.new_page()
        self.troubles, self.requests = [], []
        self.page.add_init_script(init)
        self.page.on(
            "console", lambda said: self.troubles.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        self.page.goto(f"file://{path}{link}")
        self.page.wait_for_function("document.body.dataset.drawn")
        assert self.page.evaluate("document.body.dataset.drawn") == "yes", self.troubles

    def ask(self, script):
        return self.page.evaluate(script)

    def wait(self, script):
        self.page.wait_for_function(script)

    def data(self, key, place=0):
        """The columns of a figure's line, counts or image, as the page holds them now."""
        return self.ask(
            f"""(() => {{
                const plot = timTrace.state.views["{key}"].model;
                const held = plot.renderers.map((each) => each.data_source).find((each) => each.name === "{key}/{place}");
                return Object.fromEntries(Object.entries(held.data).map(([name, values]) =>
                    [name, Array.from(values, (value) => value?.length === undefined ? value : Array.from(value))]));
            }})()"""
        )


@pytest.fixture
def opened(browser, files):
    made = []

    def open_page(name="run", **options):
        made.append(Opened(browser, files(name), **options))
        return made[-1]

    yield open_page
    for each in made:
        each.context.close()


def test_every_figure_is_drawn_and_nothing_is_fetched(opened):
    shown = opened()
    figures = shown.ask("[...document.querySelectorAll('figure.chart')].map((each) => each.dataset.key)")
    assert {"k3", "p99_abs_d", "max_abs_d", "reward", "grad_norm", "entropy", "ess", "evaluation"} <= set(figures)
    assert {"d-by-probability", "d-by-position", "d-by-entropy", "contribution-bias"} <= set(figures)
    for key in figures:
        inked = shown.ask(
            f"""(() => {{
                const frame = timTrace.state.views["{key}"].canvas_view, layer = frame.primary.canvas;
                const ink = layer.getContext("2d").getImageData(0, 0, layer.width, layer.height).data;
                return ink.some((value) => value > 0);
            }})()"""
        )
        assert inked, f"{key} is blank"
    assert shown.requests == [shown.page.url]
    assert shown.troubles == []


@pytest.mark.slow
def test_hovering_one_series_tells_the_values_of_all(opened):
    shown = opened()
    shown.page.locator("#f-reward .plot").hover(position={"x": 500, "y": 40})
    shown.wait("document.querySelector('#hovered').textContent.startsWith('step')")
    step = int(re.search(r"\d+", shown.ask("document.querySelector('#hovered').textContent"))[0])
    for key in ("reward", "k3", "grad_norm"):
        value = shown.data(key)["y"][step - 1]
        told = float(shown.ask(f"document.querySelector('#f-{key} output').textContent").split()[0])
        assert told == pytest.approx(value, rel=2e-3)


@pytest.mark.slow
def test_a_click_shows_that_step_everywhere(opened):
    shown = opened()
    shown.page.locator("#f-k3 .plot").click(position={"x": 700, "y": 40})
    shown.wait("document.body.dataset.step")
    step = int(shown.ask("document.body.dataset.step"))
    assert shown.page.url.endswith(f"#step={step}")
    assert shown.ask("document.querySelector('#chosen').textContent") == f"step {step}"
    shown.wait("document.querySelector('#chosen-line').style.display === 'block'")
    assert sum(shown.data("d-by-probability")["counts"][0]) == NUM_STEPS * (ROWS * 6 - 1)
    assert shown.ask(
        "[...document.querySelectorAll('#sequences tr.of-step')].every((row) => row.dataset.step === document.body.dataset.step)"
    )
    shown.page.check("#filter-step")
    rows = shown.ask(
        "[...document.querySelectorAll('#sequences tbody tr')].filter((row) => !row.hidden).map((row) => row.dataset.step)"
    )
    assert rows
    assert set(rows) == {str(step)}
    shown.page.click("#whole")
    shown.wait("document.querySelector('#chosen-line').style.display === 'none'")
    assert shown.troubles == []


@pytest.mark.slow
def test_a_link_to_a_step_opens_at_that_step(opened):
    shown = opened(link="#step=21")
    shown.wait("document.querySelector('#chosen').textContent === 'step 21'")
    assert shown.ask("document.querySelector('#step').value") == "20"
    shown.page.locator("#f-k3 .marks button").first.click()
    shown.wait("document.body.dataset.step !== '21'")
    assert abs(int(shown.ask("document.body.dataset.step")) - 20) <= 2


@pytest.mark.slow
def test_zooming_one_series_zooms_all(opened):
    shown = opened()
    shown.page.locator("#f-k3 .plot").scroll_into_view_if_needed()
    box = shown.page.locator("#f-k3 .plot").bounding_box()
    shown.page.mouse.move(box["x"] + 300, box["y"] + 20)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 600, box["y"] + 60, steps=4)
    shown.page.mouse.up()
    shown.wait("timTrace.state.views.reward.model.x_range.end < 25")
    ends = shown.ask("['k3', 'grad_norm'].map((key) => timTrace.state.views[key].model.x_range.end)")
    assert ends[0] == ends[1]
    shown.page.click("#reset")
    shown.wait(f"timTrace.state.views.reward.model.x_range.end > {NUM_STEPS}")


@pytest.mark.slow
def test_the_words_of_a_model_stay_words(opened):
    shown = opened()
    for place in range(6):
        shown.page.locator("#sequences tbody tr").nth(place).click()
        shown.wait("document.querySelectorAll('#tokens-text .token[data-i]').length === 6")
        assert shown.ask(
            "[...document.querySelectorAll('#tokens-text .token')].every((each) => each.children.length === 0)"
        )
        texts = shown.ask("document.querySelector('#tokens-text').textContent")
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b-\u200f\x00-\x08\x1b]", texts)
    told = shown.ask(
        "window.hacked === undefined && document.querySelectorAll('main script, main img, b.bold').length === 0"
    )
    assert told
    assert "<em>" in shown.ask("document.querySelector('#sequences .id').textContent")
    assert shown.ask("document.querySelectorAll('#sequences em, #provenance i, figcaption u').length") == 0
    assert shown.troubles == []


@pytest.mark.slow
def test_a_token_tells_its_exact_values_to_the_mouse_and_to_the_keyboard(opened):
    shown = opened()
    row = shown.page.locator("#sequences tbody tr").first
    row.focus()
    shown.page.keyboard.press("Enter")
    shown.wait("document.activeElement.id === 'tokens-text'")
    shown.page.keyboard.press("ArrowRight")
    shown.page.keyboard.press("ArrowRight")
    facts = shown.ask(
        "Object.fromEntries([...document.querySelectorAll('#token-facts dt')].map((each) => [each.textContent, each.nextSibling.textContent]))"
    )
    assert facts["position"] == "2 (0 to 5)"
    one = shown.ask(
        "({d: timTrace.state.open.d[2], id: timTrace.state.open.ids[2], train: timTrace.state.open.p.train[2]})"
    )
    assert float(facts["d"].split()[0]) == pytest.approx(one["d"], rel=1e-8)
    assert float(facts["logprob train"]) == pytest.approx(one["train"], rel=1e-8)
    assert one["d"] == pytest.approx(-1 - NUM_STEPS / 100, abs=1e-5)
    assert facts["id"] == str(one["id"])
    shown.page.locator("#tokens-text .token[data-i='4']").hover()
    shown.wait("document.querySelector('#token-facts dd').textContent === '4 (0 to 5)'")
    for mode in ("ratio", "p:train", "p:rollout", "d"):
        shown.page.select_option("#mode", mode)
        assert shown.ask("document.querySelectorAll('#tokens-text .token.up, #tokens-text .token.down').length") > 0
    assert shown.troubles == []


@pytest.mark.slow
def test_the_arrow_keys_go_from_sequence_to_sequence(opened):
    shown = opened()
    shown.page.locator("#sequences tbody tr").first.focus()
    shown.page.keyboard.press("ArrowDown")
    assert shown.ask("document.activeElement === document.querySelectorAll('#sequences tbody tr')[1]")
    assert shown.ask("document.querySelectorAll('#sequences tbody tr[tabindex=\"0\"]').length") == 1
    shown.page.fill("#filter-text", "-3")
    assert (
        shown.ask("[...document.querySelectorAll('#sequences tbody tr')].find((row) => row.tabIndex === 0).hidden")
        is False
    )


@pytest.mark.slow
def test_masked_tokens_are_struck_and_prompts_dimmed(opened):
    shown = opened()
    shown.page.fill("#filter-text", "</em>-0")
    shown.page.locator("#sequences tbody tr:not([hidden])").first.click()
    shown.wait("document.querySelectorAll('#tokens-text .masked').length === 1")
    style = "getComputedStyle(document.querySelector('#tokens-text {}')).{}"
    assert "line-through" in shown.ask(style.format(".masked", "textDecorationLine"))
    assert float(shown.ask(style.format(".prompt", "opacity"))) < 1


@pytest.mark.slow
def test_the_table_is_sorted_and_filtered(opened):
    shown = opened()
    shown.page.locator("#sequences th", has_text="reward").locator("button").click()
    column = "[...document.querySelectorAll('#sequences tbody tr')].map((row) => Number(row.children[4].dataset.value))"
    values = shown.ask(column)
    assert values == sorted(values, reverse=True)
    shown.page.locator("#sequences th", has_text="reward").locator("button").click()
    assert shown.ask(column) == sorted(values)
    shown.page.select_option("#filter-why", "typical")
    assert set(
        shown.ask(
            "[...document.querySelectorAll('#sequences tbody tr')].filter((row) => !row.hidden).map((row) => row.dataset.why.includes('typical'))"
        )
    ) == {True}
    shown.page.fill("#filter-text", "no such thing")
    assert shown.ask("!document.querySelector('#none-shown').hidden")


@pytest.mark.slow
def test_the_first_screen_has_the_answers_and_a_curve(opened):
    shown = opened(size=(1280, 800))
    curve = shown.page.locator("#run figure.chart .plot").first.bounding_box()
    assert curve["y"] > 0
    assert curve["y"] + curve["height"] <= 800


@pytest.mark.slow
def test_an_opened_answer_stretches_no_other_and_covers_nothing(opened):
    shown = opened(size=(1280, 800))
    boxes = "[...document.querySelectorAll('.answers li')].map((each) => each.getBoundingClientRect().height)"
    before = shown.ask(boxes)
    for place in range(5):
        shown.page.locator(".answers summary").nth(place).click()
        shown.wait(
            f"document.querySelectorAll('.answers details')[{place}].open && document.querySelector('.answers').style.marginBottom"
        )
        assert shown.ask(boxes) == before
        # The margin is still that of the answer before until the page has been laid out anew.
        shown.wait(
            f"document.querySelectorAll('.why')[{place}].getBoundingClientRect().bottom"
            " <= document.querySelector('.next').getBoundingClientRect().top"
        )
        assert shown.ask("document.querySelectorAll('.answers details[open]').length") == 1
    shown.page.locator(".answers summary").nth(4).click()
    shown.wait("!document.querySelector('.answers').style.marginBottom")


@pytest.mark.slow
def test_tokens_are_shown_without_a_click_and_follow_the_chosen_step(opened):
    shown = opened()
    first = "document.querySelector('#sequences tbody tr').dataset.step"
    shown.wait(f"document.querySelector('#tokens-view h3').textContent.startsWith('Step ' + {first} + ',')")
    assert shown.ask("document.querySelectorAll('#tokens-text .token[data-i]').length") == 6
    assert shown.ask("scrollY") == 0
    shown.ask("timTrace.choose(7)")
    shown.wait("document.querySelector('#tokens-view h3').textContent.startsWith('Step 7,')")
    assert shown.ask("document.querySelector('#sequences tr[aria-selected=true]').dataset.step") == "7"
    assert shown.ask("scrollY") == 0


def test_a_step_is_shown_before_any_figure_is_drawn(browser, files, tmp_path):
    page = browser.new_page()
    without = files("run").read_text(encoding="utf-8")
    without = re.sub(r'(id="pack-bokeh">)[^<]*', r"\1", without)
    undrawn = tmp_path / "undrawn.html"
    undrawn.write_text(without, encoding="utf-8")
    page.goto(f"file://{undrawn}#step=21")
    page.wait_for_function("document.body.dataset.drawn === 'no'")
    page.wait_for_function("document.querySelector('#tokens-view h3').textContent.startsWith('Step 21,')")
    assert page.evaluate("document.querySelector('#chosen').textContent") == "step 21"
    assert page.evaluate("document.querySelector('#step').value") == "20"
    page.close()


@pytest.mark.slow
def test_bins_that_hold_what_is_beyond_are_marked(opened):
    shown = opened()
    labels = """timTrace.state.views['d-by-probability'].model.center
        .filter((each) => each.type === "Label").map((each) => each.text)"""
    assert shown.ask(labels) == ["all above", "all below"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_no_figure_is_ever_drawn_in_another_theme(opened, scheme):
    shown = opened(scheme=scheme, init=WATCH_COLOURS)
    drawn = shown.ask("window.inks")
    assert len(drawn) == shown.ask("document.querySelectorAll('figure.chart .plot').length")
    assert set(drawn) == {shown.ask("getComputedStyle(document.documentElement).getPropertyValue('--ink-soft').trim()")}


WATCH_COLOURS = """
window.inks = [];
new MutationObserver((changes) => {
    for (const added of changes.flatMap((change) => [...change.addedNodes])) {
        if (!added.parentElement?.classList?.contains("plot")) continue;
        const view = Object.values(Bokeh.index).flatMap((view) => view.roots ?? [view])
            .find((view) => view.el === added);
        window.inks.push(view?.model.left[0].major_label_text_color ?? "none");
    }
}).observe(document, {childList: true, subtree: true});
"""
"""Notes what colour the labels of each figure have when it enters the page."""


@pytest.mark.slow
def test_the_theme_that_was_chosen_is_kept(opened):
    light = opened(scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = light.ask(paper)
    light.page.click("#theme")
    light.page.reload(wait_until="commit")
    light.wait("document.body")
    assert light.ask(paper) != before


@pytest.mark.slow
def test_dark_and_light_are_told_apart_and_can_be_changed(opened):
    paper = "getComputedStyle(document.body).backgroundColor"
    dark, light = opened(scheme="dark"), opened(scheme="light")
    assert dark.ask(paper) != light.ask(paper)
    light.page.click("#theme")
    assert light.ask(paper) == dark.ask(paper)
    ink = "timTrace.state.views.k3.model.left[0].major_label_text_color"
    light.wait(f"{ink} === '{dark.ask(ink)}'")


@pytest.mark.slow
def test_a_phone_needs_no_sideways_scrolling(opened):
    shown = opened(size=(390, 844))
    assert shown.ask("document.documentElement.scrollWidth") <= 390
    assert shown.ask("document.querySelector('#verdict h1').getBoundingClientRect().top") < 844


@pytest.mark.slow
def test_a_note_opens_inside_the_window(opened):
    shown = opened(size=(390, 844))
    outside = """[...document.querySelectorAll('.term')].filter((term) => {
        term.focus();
        const box = term.querySelector('.tip').getBoundingClientRect();
        return box.width && (box.left < 0 || box.right > 390);
    }).length"""
    assert shown.ask(outside) == 0


@pytest.mark.slow
def test_the_slider_sticks_below_the_header_however_many_lines_that_has(opened):
    shown = opened("two", size=(390, 844))
    shown.ask("document.querySelector('#f-reward').scrollIntoView()")
    top, bottom = shown.ask(
        "[document.querySelector('.steps').getBoundingClientRect().top, document.querySelector('header').getBoundingClientRect().bottom]"
    )
    assert abs(top - bottom) <= 2


@pytest.mark.slow
def test_runs_lie_over_each_other(opened):
    shown = opened("two")
    assert len(shown.data("reward", 0)["x"]) == NUM_STEPS
    assert len(shown.data("reward", 1)["x"]) == 14
    shown.page.uncheck("[data-line='other']")
    shown.wait(
        "timTrace.state.views.reward.model.renderers.filter((each) => each.name === 'other').every((each) => !each.visible)"
    )
    assert shown.ask("document.querySelectorAll('#verdict tbody tr').length") == 2
    assert shown.troubles == []


@pytest.mark.slow
def test_in_the_frame_of_a_notebook_it_stays_in_its_frame(browser, tmp_path):
    from tim_trace.analysis import report

    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><body>{report(make_run(tmp_path / 'run'))._repr_html_()}", encoding="utf-8")
    page = browser.new_page()
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(f"file://{notebook}")
    frame = page.frames[1]
    frame.wait_for_function("document.body && document.body.dataset.drawn")
    frame.evaluate("timTrace.choose(5)")
    frame.wait_for_function("document.querySelector('#chosen').textContent === 'step 5'")
    frame.click("nav a[href='#tokens']")
    frame.wait_for_function("scrollY > 0")
    assert frame.url == "about:srcdoc"
    assert page.url == f"file://{notebook}"
    assert troubles == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desk", "phone"])
def test_runs_side_by_side_are_whole_in_the_window(opened, size):
    shown = opened("two", size=size)
    outside = """[...document.querySelectorAll('.sides tbody :is(th, td), .sides thead th')].filter((cell) => {
        const box = cell.getBoundingClientRect();
        return box.width && (box.left < 0 || box.right > document.documentElement.clientWidth || cell.scrollWidth > cell.clientWidth);
    }).length"""
    assert shown.ask(outside) == 0
    assert shown.ask("document.querySelectorAll('.sides tbody td').length") == 10
    if size[0] == 390:
        named = "getComputedStyle(document.querySelectorAll('.sides td')[4], '::before').content"
        assert shown.ask(named) == '"Did the run collapse, and why?"'


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 12, 22, 29])
def test_the_words_of_a_collapse_are_whole_in_a_phone_s_window(opened, step):
    shown = opened(size=(390, 844), init=FALLEN.format(step=step))
    box = shown.ask("document.querySelector('#fall span').getBoundingClientRect().toJSON()")
    assert box["width"] > 100
    assert box["left"] >= 0
    assert box["right"] <= 390


FALLEN = """
document.addEventListener("DOMContentLoaded", () => document.querySelector(".stack").insertAdjacentHTML("beforeend",
    `<div id="fall" data-low="{step}" data-high="{step}"><span>reward drops after step {step} (2 to 30)</span></div>`));
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desk", "phone"])
def test_what_the_keyboard_reaches_is_in_sight_with_a_ring_and_its_note(opened, size):
    shown = opened("two", size=size)
    seen = 0
    for _ in range(250):
        shown.page.keyboard.press("Tab")
        found = shown.ask(FOCUSED)
        if found is None:
            break
        seen += 1
        assert found["ring"], found
        assert found["in_sight"], found
        assert found["is_note_whole"], found
    assert 100 < seen < 250


FOCUSED = """(() => {
    const one = document.activeElement;
    if (one === document.body) return null;
    const box = one.getBoundingClientRect(), style = getComputedStyle(one.closest(".plot") ?? one);
    const x = (Math.max(box.left, 0) + Math.min(box.right, innerWidth)) / 2, y = Math.min(box.top + box.height / 2, innerHeight - 2);
    const top = document.elementFromPoint(x, y), note = one.querySelector(".tip"), open = note?.getBoundingClientRect();
    return {
        what: one.outerHTML.slice(0, 80), ring: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
        in_sight: Boolean(top && (one.contains(top) || top.contains(one))),
        is_note_whole: !note || (open.width > 0 && open.left >= 0 && open.right <= innerWidth && open.top >= 0 && open.bottom <= innerHeight),
    };
})()"""
"""What has the focus: whether a ring surrounds it, nothing covers it, and its note is open inside the window."""


@pytest.mark.slow
def test_a_figure_s_values_are_read_with_the_arrow_keys(opened):
    shown = opened()
    for key in shown.ask("[...document.querySelectorAll('figure.chart:has(.plot)')].map((each) => each.dataset.key)"):
        shown.ask(f"document.querySelector('#f-{key} summary').focus()")
        shown.page.keyboard.press("Tab")
        shown.page.keyboard.press("ArrowRight")
        assert shown.ask(f"document.querySelector('#f-{key} output').textContent"), key
    chosen = int(shown.ask("document.body.dataset.step"))
    assert chosen == len(shown.ask("[...document.querySelectorAll('#run figure.chart')].map(() => 1)"))
    shown.page.focus("#f-d-by-entropy summary")
    shown.page.keyboard.press("Tab")
    for _ in range(2):
        shown.page.keyboard.press("ArrowRight")
    shown.page.keyboard.press("ArrowLeft")
    mean, rms = (shown.data("d-by-entropy", place) for place in (0, 1))
    told = re.match(
        r"([\d.e-]+): mean \|d\| ([\d.e-]+) nats, rms d ([\d.e-]+) nats", shown.ask("document.querySelector('#f-d-by-entropy output').textContent")
    )  # fmt: skip
    assert [float(value) for value in told.groups()] == pytest.approx(
        [mean["x"][1], mean["y"][1], rms["y"][1]], rel=1e-3
    )
    shown.page.focus("#f-d-by-probability summary")
    shown.page.keyboard.press("Tab")
    shown.page.keyboard.press("ArrowLeft")
    assert re.match(
        r"0\.\d+: \d+ tokens, most at d = ",
        shown.ask("document.querySelector('#f-d-by-probability output').textContent"),
    )
    assert shown.troubles == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one-pass", "empty"])
def test_a_trace_that_cannot_say_much_says_that(opened, name):
    shown = opened(name)
    assert shown.ask("document.querySelectorAll('.answers li.open').length") >= 3
    assert shown.ask("document.querySelectorAll('.next code').length") >= 1
    assert shown.requests == [shown.page.url]
    assert shown.troubles == []


@pytest.mark.slow
def test_every_control_can_be_reached_with_the_keyboard(opened):
    shown = opened()
    shown.page.keyboard.press("Tab")
    reached = set()
    for _ in range(120):
        reached.add(
            shown.ask("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
        shown.page.keyboard.press("Tab")
    assert {"theme", "step", "reset", "skip"} <= reached
    shown.page.focus("#step")
    shown.page.keyboard.press("ArrowLeft")
    shown.wait("document.body.dataset.step")
