"""The page of a report in a real browser: it sorts, filters, opens and plays, asks for nothing, and can be read."""

import re

import browser
import pytest
from results import documents, hf, ours, trace

from lm_eval_duel import demo
from lm_eval_duel.cli import report
from lm_eval_duel.results import traced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.executable() is None, reason="no Chromium: apt-get install chromium"),
]
EVIL = "</script><img src=x onerror=alert(1)>"  # a model is named by what follows the last slash
ORDERS = {  # nats of two documents, and the steps of the first
    "left_to_right:k=1": ((-100, -200), [0, 1, 0, 1]),
    "greedy:k=1": ((-110, -220), [1, 0, 1, 0]),
    "greedy:k=2": ((-150, -290), [0, 0, 0, 0]),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page whose texts are ids, in markup."""
    folder = tmp_path_factory.mktemp("board")
    traces = []

    def made(make, nats, **more):
        return make(folder / "in", docs={"sotu": documents(nats, (20, 40), ["text 0", "text 1"])}, **more)

    made(hf, (-90, -190), model="ARM")
    made(ours, (-130, -250), estimator="elbo")
    made(ours, (-60, -120), estimator="oracle")
    made(ours, (-140, -260), model=EVIL, spec={"cache": "dual"})
    for rule, (nats, steps) in ORDERS.items():
        window = {"task": "sotu", "doc": 0, "request": 0, "window": 0, "ids": [5, 6, 7, 8], "starts": [0, 2]}
        window |= {"reveal_steps": steps, "token_logprobs": [-0.5, -1.0, -7.0, None], "values": {"duel": None}}
        traces.append(str(trace(folder / f"{len(traces)}.jsonl", made(ours, nats, rule=rule), [window])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "token_texts", lambda ids, tokenizer: [f"<b>{n}</b> " for n in ids])
        words = ["--traces", *traces, "--tokenizer", "demo-mdm", "--published", "paper", "--page"]
        report.main([str(folder / "in"), "--out", str(folder / "site"), *words])
    return folder / "site" / "index.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    window = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield window
    window.close()


@pytest.fixture
def opened(chromium, page):
    chromium.open(page)
    yield chromium
    assert chromium.problems == [], "no console message and no error"
    assert set(chromium.requests) <= {page.resolve().as_uri(), "data:,"}, "no request to anywhere"


def rows(window, key="rule"):
    """The texts of a column of the rows that are shown."""
    return window.run(
        '[...document.querySelectorAll("#board tr.row")].filter((row) => row.checkVisibility())'
        f'.map((row) => row.querySelector(".k-{key}").textContent.trim())'
    )


def enter(window, field, value):
    """Enter a value into a field, as a person does."""
    window.run(
        f'Object.assign(document.getElementById("{field}"), {{ value: "{value}" }}).dispatchEvent(new Event("input"))'
    )


def test_columns_sort_and_the_oracle_stays_apart(opened):
    value = '(row) => parseFloat(row.querySelector("td.g-value:not(.plot)").textContent.replace(/≤\\s/, ""))'
    values = opened.run(f'[...document.querySelectorAll("#board tbody:first-of-type tr.row")].map({value})')
    assert values == sorted(values), "rows come in the order of their ranks"
    *ranks, rank_of_oracle = rows(opened, "rank")
    assert rank_of_oracle == ""

    buttons = 'document.querySelectorAll("#board thead button")'
    titles = opened.run(f"[...{buttons}].map((button) => button.textContent)")
    assert "sotu ppl/token" in titles
    for n, title in enumerate(titles):
        for direction in ("ascending", "descending"):
            opened.run(f"{buttons}[{n}].click()")
            assert opened.run(f'{buttons}[{n}].closest("th").ariaSort') == direction or n == 0
            assert opened.run('document.querySelectorAll("#board thead th[aria-sort]").length') == 1
            assert rows(opened, "estimator")[-1].startswith("Oracle")
            assert rows(opened, "rank")[-1] == ""
        if title == "sotu ppl/token":
            assert rows(opened, "rank") == [*reversed(ranks), ""]


def test_a_cell_that_says_why_it_has_no_number_comes_last(opened):
    cells = '[...document.querySelectorAll("#board tbody:first-of-type td.g-value:not(.plot)")]'
    opened.run(f'{cells}[0].firstChild.textContent = "unclear"')
    for _ in ("ascending", "descending"):
        opened.run('document.querySelector("#board thead th.g-value:not(.plot) button").click()')
        texts = opened.run(f"{cells}.map((cell) => cell.firstChild.textContent)")
        assert texts[-1] == "unclear"


def test_the_filter(opened):
    everything = rows(opened)
    rules_by_words = {
        "two words": [],
        "MDLM duel": ["left_to_right", "greedy", "greedy:k=2"],
        "dual": ["greedy"],
        "": everything,
    }

    for words, rules in rules_by_words.items():
        enter(opened, "filter", words)
        assert sorted(rows(opened)) == sorted(rules), words
        assert opened.run('document.getElementById("count").textContent').startswith(f"{len(rules)} of ")


def test_everything_works_from_the_keyboard(opened):
    def press(field, *key):
        opened.run(f'document.querySelector("{field}").focus()')
        opened.press(*key)

    press("#board thead .k-model button", "Enter", 13, "\r")
    assert opened.run('document.querySelector("#board thead .k-model").ariaSort') == "ascending"
    press("#board tr.row .open", "Enter", 13, "\r")
    assert opened.run('document.querySelector("#board tr.row .open").ariaExpanded') == "true"
    press("#left .tokens", "ArrowRight", 39)
    assert "Token 1" in opened.run('document.querySelector("#left .token").textContent')
    before = int(opened.run('document.getElementById("step").value'))
    press("#step", "ArrowRight", 39)
    assert opened.run('document.getElementById("step").value') == str(before + 1)
    fields = '[...document.querySelectorAll("button, input, select")].filter((field) => field.checkVisibility())'
    unnamed = "(field) => !(field.labels?.length || field.ariaLabel || field.textContent.trim())"
    assert opened.run(f"{fields}.filter({unnamed}).length") == 0, "every control has a name"


def test_the_slider_plays_the_unmasking(opened):
    """Blocks of two tokens, one after the other: in each the left order goes forwards, the right one backwards."""
    assert opened.run('document.getElementById("step").max') == "4"
    for step in range(5):
        enter(opened, "step", step)
        for side, order in (("left", [0, 1, 2, 3]), ("right", [1, 0, 3, 2])):  # which token is revealed at which step
            spans = f'[...document.querySelectorAll("#{side} .tokens span")]'
            masked = opened.run(f'{spans}.map((span) => span.classList.contains("masked"))')
            assert masked == [n not in order[:step] for n in range(4)], (side, step)
    assert "Infinity nats" in opened.run('document.querySelector("#left .sum").textContent')


def test_the_line_on_a_token_follows_the_slider_and_the_order(opened):
    line = 'document.querySelector("#left .token").textContent'
    enter(opened, "step", 0)
    opened.run('document.querySelector("#left .tokens").focus()')
    opened.press("ArrowRight", 39)
    assert "still masked" in opened.run(line)
    enter(opened, "step", 4)
    assert "nats" in opened.run(line)
    opened.run('document.getElementById("left-order").dispatchEvent(new Event("change"))')
    assert opened.run(line).startswith("Point at a token")


def test_a_remark_is_hidden_with_the_columns_that_refer_to_it(opened):
    remarks = '[...document.querySelectorAll("[data-groups]")]'
    shown = f"{remarks}.filter((one) => !one.hidden).map((one) => one.dataset.groups)"
    before = opened.run(shown)
    group = next(groups for groups in before if " " not in groups)  # of one group of columns
    others = [groups for groups in before if groups != group]
    box = f'document.querySelector("[data-group={group}]")'

    opened.run(f"{box}.click()")
    assert opened.run(shown) == others
    assert others != before

    opened.run(f"{box}.click()")
    assert opened.run(shown) == before


def test_the_table_of_the_bundled_results_fits_a_laptop(chromium, tmp_path):
    """Its costs are seen without scrolling, and columns sort by their numbers, bounds included."""
    report.main([str(demo.FOLDER / "results"), "--page", "--figures", "none", "--out", str(tmp_path)])
    chromium.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    chromium.open(tmp_path / "index.html")
    frame = 'document.querySelector("#board").parentNode'
    assert chromium.run(f"{frame}.scrollWidth - {frame}.clientWidth") == 0
    bits = (
        '[...document.querySelectorAll("#board tbody:first-of-type tr.row td.g-bits")].map((cell) => cell.textContent)'
    )
    chromium.run('document.querySelector("#board th.g-bits button").click()')
    numbers = [float(re.search(r"\d+\.\d+", text)[0]) for text in chromium.run(bits)]
    assert any("≤" in text for text in chromium.run(bits))
    assert numbers == sorted(numbers)
    chromium.call("Emulation.clearDeviceMetricsOverride")


def test_the_bundled_page_opens_on_two_rules_of_one_model_part_way(chromium, tmp_path):
    """And with more columns than fit, each row has its method below its name, and a line says that there are more."""
    results = demo.FOLDER / "results"
    words = ["--traces", str(results / "traces"), "--page", "--figures", "none", "--out", str(tmp_path)]
    report.main([str(results), *words])
    chromium.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    chromium.open(tmp_path / "index.html")

    sides = '["left-order", "right-order"].map((id) => document.getElementById(id).selectedOptions[0].text)'
    left, right = chromium.run(sides)
    assert left != right
    assert left.split(", ")[0] == right.split(", ")[0]
    for side in ("left", "right"):
        spans = f'document.querySelectorAll("#{side} .tokens span").length'
        masked = f'document.querySelectorAll("#{side} .tokens .masked").length'
        assert 0 < chromium.run(masked) < chromium.run(spans)

    visible = '[...document.querySelectorAll("#board tr.row .k-model small")].map((name) => name.checkVisibility())'
    more = 'document.querySelector("p.more").checkVisibility()'
    assert not any(chromium.run(visible))
    assert not chromium.run(more)
    chromium.run('document.querySelector("[data-group=source]").click()')
    chromium.run('document.querySelector("[data-group=lowest]").click()')
    assert all(chromium.run(visible))
    assert chromium.run(more)
    chromium.call("Emulation.clearDeviceMetricsOverride")


def test_on_a_telephone_perplexity_is_seen_without_scrolling(opened):
    cells = '[...document.querySelectorAll("#board tr.row td.g-value:not(.plot)")]'
    for width in (360, 500):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        opened.call("Emulation.setDeviceMetricsOverride", **size)
        assert 0 < opened.run(f"Math.max(...{cells}.map((cell) => cell.getBoundingClientRect().right))") <= width
        # no number of another column is cut at the edge of the frame: the next one begins behind it
        edge = 'document.querySelector("#board").parentNode.getBoundingClientRect().right'
        others = '[...document.querySelectorAll("#board tr.row:first-child td:not(.g-value)")]'
        cut = f"(box) => box.left < {edge} - 4 && box.right > {edge}"
        assert opened.run(f"{others}.map((cell) => cell.getBoundingClientRect()).filter({cut}).length") == 0
    opened.call("Emulation.clearDeviceMetricsOverride")


def test_a_name_cannot_run_even_as_markup(chromium, page, tmp_path):
    """A second wall: the page's content security policy stops what would get past the escaping."""
    broken = tmp_path / "broken.html"
    text = page.read_text().replace("<main>", "<main><script>window.ran = 1</script><img src=http://127.0.0.1:9/x>")
    broken.write_text(text)

    chromium.open(broken)

    assert chromium.run("window.ran") is None
    stopped = [problem["entry"] for problem in chromium.problems]
    assert [entry["source"] for entry in stopped] == ["security", "security"], "the script and the image"
    assert any("http://127.0.0.1:9/x" in entry["text"] for entry in stopped)
