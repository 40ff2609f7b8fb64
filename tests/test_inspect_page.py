"""The page of a token report in a real browser, opened from disk. Run with `-m slow`.

Needs playwright (pip install playwright) and its browser, or a chromium of the system.
"""

import dataclasses
import shutil

import pytest
from test_inspection import awkward_rows, hostile_report

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.inspection import TokenReport


pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
RULE = TokenSeekConfig(ratio=0.3)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        system = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report():
    return TokenReport(awkward_rows(), RULE, "tiny", "here", 0)


@pytest.fixture
def page(browser, report, tmp_path):
    yield from opened(browser, report, tmp_path)


def opened(browser, report, tmp_path, **context):
    report.save(tmp_path / "report.html")
    page = browser.new_page(**context)
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    yield page
    assert problems == []
    assert requests == [(tmp_path / "report.html").as_uri()]
    page.close()


def marked(page) -> list[list[int]]:
    """The kept tokens of each row, as the page shows them now."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(
        "() => [...document.querySelectorAll('article.row')].map("
        "row => [...row.querySelectorAll('.t.kept')].map(t => Number(t.dataset.i)))"
    )


def expected(report, config, step=0):
    return [row.kept(config, step) for row in report.rows]


def choose(page, value):
    page.locator(f"label:has(input[value={value}])").click()


def slide(page, name, value):
    page.locator(f"#{name}").fill(str(value))


def test_it_opens_with_the_marks_of_the_library(page, report):
    assert marked(page) == expected(report, RULE)
    assert f"in {len(report.rows)} of {len(report.rows)} rows" in page.locator("#check").text_content()
    assert page.locator("article.row").count() == len(report.rows)


def test_the_sliders_and_the_rules_mark_anew(page, report):
    paper = TokenSeekConfig.paper()
    random = dataclasses.replace(RULE, scorer="random")
    for ratio in (0.05, 0.1, 0.5, 0.9):
        slide(page, "ratio", ratio)
        assert page.locator("#ratio-n").input_value() == str(ratio)
        assert marked(page) == expected(report, dataclasses.replace(RULE, ratio=ratio))
    choose(page, "random")
    assert marked(page) == expected(report, dataclasses.replace(random, ratio=0.9))
    choose(page, "paper")
    for ratio, alpha, beta in ((0.1, 1, 1), (0.22, 0.7, 0.3), (0.5, 0, 2), (0.5, 0.3, 0), (0.3, 0.1, 3)):
        slide(page, "ratio", ratio)
        slide(page, "alpha", alpha)
        slide(page, "beta", beta)
        assert marked(page) == expected(report, dataclasses.replace(paper, ratio=ratio, alpha=alpha, beta=beta))
    page.locator("#ratio-n").fill("0.123")
    slide(page, "alpha", 1)
    assert marked(page) == expected(report, dataclasses.replace(paper, ratio=0.123, alpha=1, beta=3))
    slide(page, "alpha", 0)
    slide(page, "beta", 0)
    sync_api.expect(page.locator("#problem")).to_contain_text("both 0")  # waits for the page to draw
    sync_api.expect(page.locator("#problem")).to_be_visible()


def test_another_step_draws_others(page, report):
    first = marked(page)
    page.locator("#step").fill("7")
    assert marked(page) == expected(report, RULE, step=7) != first
    choose(page, "paper")
    sync_api.expect(page.locator("#step")).to_be_hidden()


def test_the_bar_is_the_chance_to_be_kept(page, report):
    """Over many steps a token is kept as often as its bar says."""
    strengths = (
        page.locator("article.row")
        .nth(3)
        .locator(".t")
        .evaluate_all("tokens => tokens.map(t => Number(t.style.getPropertyValue('--p')))")
    )
    row, n_steps = report.rows[3], 1000
    counts = [0] * len(row.tokens)
    for step in range(n_steps):
        for i in row.kept(RULE, step):
            counts[i] += 1
    assert max(strengths) == 1.0
    for strength, count in zip(strengths, counts, strict=True):
        assert abs(strength - count / n_steps) < 0.05


def test_shading_follows_the_signal(page, report):
    def levels():
        marked(page)
        return (
            page.locator("article.row")
            .nth(3)
            .locator(".t")
            .evaluate_all(
                "tokens => tokens.map(t => Number([...t.classList].find(c => /^s[0-9]+$/.test(c)).slice(1)))"
            )
        )

    gradient = levels()
    assert gradient.index(15) == 43 and sum(gradient) == 15  # one token dominates
    page.locator("#scale").select_option("rank")
    assert sorted(set(levels())) == list(range(16))
    page.locator("#scale").select_option("value")
    choose(page, "context")
    best = int(report.rows[3].context.argmax())
    assert levels()[best] == 15
    choose(page, "combined")
    sync_api.expect(page.locator("#alpha")).to_be_visible()
    slide(page, "alpha", 0)
    assert levels() == gradient


def test_rows_are_text_and_nothing_else(browser, tmp_path):
    report, texts = hostile_report()
    for page in opened(browser, report, tmp_path):
        shown = page.locator("article.row .t").evaluate_all("tokens => tokens.map(t => t.textContent)")
        assert shown == [*(text for text in texts if text != "\n"), "↵\n"]
        assert page.locator("article.row b, article.row i, article.row script").count() == 2  # the two captions
        assert page.locator("#model").text_content() == "<i>m</i>{{data}}"
        page.locator("article.row .t").first.hover()
        assert "</script><script>boom()</script>" in page.locator("#panel").text_content()


def test_it_is_used_by_keyboard(page, report):
    page.locator("input[name=shade]:checked").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("input[name=shade]:checked").get_attribute("value") == "combined"
    page.locator("#ratio").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#ratio-n").input_value() == "0.31"
    assert marked(page) == expected(report, dataclasses.replace(RULE, ratio=0.31))

    page.locator("article.row").first.locator(".t").first.focus()
    panel = page.locator("#panel")
    assert panel.is_visible() and "token 1 of 25" in panel.text_content()
    page.keyboard.press("ArrowRight")
    assert "token 2 of 25" in panel.text_content()
    kept = marked(page)[0]
    page.keyboard.press("ArrowDown")
    assert f"token {kept[0] + 1} of 25" in panel.text_content() and "kept at step 0" in panel.text_content()
    page.keyboard.press("ArrowDown")
    assert f"token {kept[1] + 1} of 25" in panel.text_content()
    page.keyboard.press("ArrowUp")
    assert f"token {kept[0] + 1} of 25" in panel.text_content()
    page.keyboard.press("End")
    assert "token 25 of 25" in panel.text_content()
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    page.keyboard.press("Tab")  # a row is one stop
    assert page.evaluate("document.activeElement.closest('article.row').dataset.row") == "1"


def test_the_numbers_of_a_token(page, report):
    row = report.rows[0]
    page.locator("article.row").first.locator(".t").nth(12).hover()
    text = page.locator("#panel").text_content()
    assert "response, token 13 of 25, id 22; learns to predict “·w13”" in text
    assert f"{float(row.context[12]):.4g}"[:5] in text and f"{float(row.gradient[12]):.4g}"[:5] in text
    rank = int((row.gradient > row.gradient[12]).sum()) + 1
    assert f"rank {rank} of 25" in text
    page.locator("article.row").first.locator(".t").nth(2).hover()
    assert "prompt, token 3" in page.locator("#panel").text_content()
    assert "carries no loss" in page.locator("#panel").text_content()


def test_the_overlap_is_the_reports(page, report):
    assert page.locator("#stats b").first.text_content() == f"{report.overlap():.2f}"
    assert page.locator("#charts svg").count() == 3


@pytest.mark.parametrize(("scheme", "page_color"), [("light", "rgb(246, 247, 249)"), ("dark", "rgb(13, 17, 23)")])
def test_it_follows_the_colour_scheme(browser, report, tmp_path, scheme, page_color):
    for page in opened(browser, report, tmp_path, color_scheme=scheme):
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == page_color


def test_it_fits_a_phone(browser, report, tmp_path):
    for page in opened(browser, report, tmp_path, viewport={"width": 360, "height": 740}):
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.locator("article.row").first.locator(".t").nth(12).click()
        box = page.locator("#panel").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 740


def test_a_notebook_shows_it_in_a_frame(browser, report, tmp_path):
    """Put into a page as notebooks do: by innerHTML, which runs no scripts of its own."""
    page = browser.new_page()
    page.evaluate("html => { document.body.innerHTML = html; }", report._repr_html_())
    frame = page.frame_locator("iframe")
    frame.locator("article.row").nth(1).locator(".t.kept").first.wait_for()
    assert frame.locator("#check").text_content().startswith("Checked on opening")
    page.close()
