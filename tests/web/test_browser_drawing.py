"""How a report of a large model is drawn: in both themes, whatever its size, and when its data cannot be read."""

from __future__ import annotations

import demo
from tests.web.browser import BODY, Tab

LARGE = "samples.output(samples.report([samples.run({ id: 1, siteCount: 2000 })]))"
MARKUP = "<img src=x onerror=alert(1)>"


def opened(tab: Tab, sample: str) -> None:
    """A workflow whose report node shows the sample, as large as the page allows."""
    tab.open({demo.REPORT: demo.node("AttentionBackendReport")})
    tab.call("() => window.app.graph.nodes[0].setSize([640, 900])")
    tab.show(sample)
    tab.page.wait_for_selector(f"{BODY} h2")
    tab.fit()


def contrast(tab: Tab, selector: str) -> float:
    """Of an element's text against the colour behind it, as WCAG defines it."""
    ratio: float = tab.call(
        """selector => {
            const element = document.querySelector(selector);
            // rgb(255, 0, 0), or color(srgb 1 0 0) for a mixed one
            const unit = (colour) => (colour.startsWith("color(") ? 1 : 255);
            const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
            const isClear = (one) => (parts(getComputedStyle(one).backgroundColor)[3] ?? 1) === 0;
            let behind = element;
            while (isClear(behind)) behind = behind.parentElement;
            const light = (colour) => {
                const [r, g, b] = parts(colour).map((part) => part / unit(colour))
                    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const found = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
            return (Math.max(...found) + 0.05) / (Math.min(...found) + 0.05);
        }""",
        selector,
    )
    return ratio


def test_a_large_model_is_readable_in_both_themes(tab: Tab) -> None:
    opened(tab, "samples.twoRuns()")
    for palette in ("dark", "light"):
        tab.set("Comfy.ColorPalette", palette)
        tab.page.wait_for_timeout(300)  # the page changes its colours one after the other
        tab.section("Calls by kernel").scroll_into_view_if_needed()
        for selector in ("h2", ".sentence", ".tile .value", ".aside", ".advice", "th"):
            assert contrast(tab, f"{BODY} {selector}") >= 4.5, (palette, selector)
        for title in ("Sites", "Why not", "Shapes", "What happened", "Compared with another run"):
            tab.section(title).scroll_into_view_if_needed()
            tab.picture(f"{palette}, {title}")
    rows = {row[0]: row[1:] for row in tab.rows("Compared with another run")}
    assert rows["seconds per step"][:2] == ["1.07 s", "1.49 s"]
    assert not tab.call("body => body.scrollWidth > body.clientWidth", tab.page.query_selector(BODY))


def test_a_strip_is_read_with_the_keys_and_holds_two_thousand_sites(tab: Tab) -> None:
    opened(tab, LARGE)
    slider = tab.page.locator(f"{BODY} [role=slider]")
    slider.focus()
    tab.page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuenow") == "0"
    first = tab.page.locator(f"{BODY} .readout").inner_text()
    assert "double 0" in first
    tab.page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuenow") == "1"
    assert tab.page.locator(f"{BODY} .readout").inner_text() != first
    tab.page.keyboard.press("End")
    assert slider.get_attribute("aria-valuenow") == "1999"
    tab.picture("two thousand sites")
    assert tab.call(f"() => document.querySelectorAll('{BODY} svg *').length") < 200


def test_what_cannot_be_drawn_says_what_to_do_and_names_with_markup_stay_text(tab: Tab) -> None:
    name = f"'{MARKUP}'"
    kernels, events = f"[{{ kernel: {name}, calls: 3, share: 1 }}]", f"[{{ step: 1, text: {name} }}]"
    run = f"samples.run({{ model: {name}, calls_by_kernel: {kernels}, events: {events} }})"
    opened(tab, f"samples.output(samples.report([{run}], {{ notes: [{name}] }}), {name})")
    assert tab.page.locator(f"{BODY} h2").inner_text() == MARKUP
    assert tab.call(f"() => document.querySelectorAll('{BODY} img').length") == 0
    for changes, said in (
        ("{ schema: 2 }", "reload the page"),
        ("{ schema: 0 }", "another version of the pack"),
        ("{ runs: null }", "not complete"),
    ):
        tab.show(f"samples.output(samples.report([samples.run()], {changes}))")
        tab.page.get_by_text(said).wait_for()
        assert "As text." in tab.page.locator(BODY).inner_text()
