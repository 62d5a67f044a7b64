"""The leaderboard's page in a real browser: it sorts, filters, opens and plays, asks for nothing, and can be read."""

import json

import browser
import pytest
from results import documents, hf, ours, trace

from lm_eval_duel.results import documents as view
from lm_eval_duel.results.leaderboard import collect, parse, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.executable() is None, reason="no Chromium: apt-get install chromium"),
]
EVIL = "</script><img src=x onerror=alert(1)>"  # a model is named by what follows the last slash
NATS = {"left_to_right:k=1": (-100, -200), "greedy:k=1": (-110, -220), "greedy:k=2": (-150, -290)}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    texts = [f"text {n}" for n in range(2)]
    hf(folder / "in", model="ARM", docs={"sotu": documents((-90, -190), (20, 40), texts)})
    ours(folder / "in", model="MDLM", estimator="elbo", docs={"sotu": documents((-130, -250), (20, 40), texts)})
    ours(folder / "in", model="MDLM", estimator="oracle", docs={"sotu": documents((-60, -120), (20, 40), texts)})
    files = [
        ours(folder / "in", model="MDLM", rule=rule, docs={"sotu": documents(nats, (20, 40), texts)})
        for rule, nats in NATS.items()
    ]
    cached = {"sotu": documents((-140, -260), (20, 40), texts)}
    ours(folder / "in", model=EVIL, docs=cached, spec={"cache": "dual"})
    traces = [
        str(trace(folder / f"{n}.jsonl", file, [_window(steps)]))
        for n, (file, steps) in enumerate(zip(files, ([0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]), strict=True))
    ]
    options = parse([str(folder / "in"), "--traces", *traces, "--out", str(folder / "site"), "--published", "paper"])
    content = collect(options)
    write(content, options)
    return folder / "site" / "index.html"


def _window(steps):
    more = {"task": "sotu", "doc": 0, "request": 0, "window": 0, "ids": [5, 6, 7, 8], "starts": [0, 2]}
    return more | {"reveal_steps": steps, "token_logprobs": [-0.5, -1.0, -7.0, None], "values": {"duel": None}}


@pytest.fixture(scope="module", autouse=True)
def tokens():
    """Traces here name no tokenizer: their texts are their ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "texts_by", lambda _: lambda name, ids: [f"<b>{n}</b> " for n in ids])
        yield


@pytest.fixture(scope="module")
def chromium(page, tmp_path_factory):
    window = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield window
    window.close()


@pytest.fixture
def opened(chromium, page):
    chromium.media()
    chromium.open(page)
    yield chromium
    assert chromium.problems == [], "no console message and no error"
    assert set(chromium.requests) <= {page.resolve().as_uri(), "data:,"}, "no request to anywhere"


def rows(window, key="rule", kind="tr.row"):
    return window.run(
        f'[...document.querySelectorAll("#board {kind}")].filter((row) => row.checkVisibility())'
        f'.map((row) => row.querySelector(".k-{key}").textContent.trim())'
    )


def click(window, selector, n=0):
    window.run(f"document.querySelectorAll({json.dumps(selector)})[{n}].click()")


def test_columns_sort_and_the_oracle_stays_apart(opened):
    head = "#board thead th.g-value:not(.plot) button"
    values = [
        float(text.split()[0])
        for text in opened.run(
            '[...document.querySelectorAll("#board tbody:first-of-type tr.row")].map((row) => '
            'row.querySelector("td.g-value:not(.plot)").firstChild.textContent.replace("≤ ", ""))'
        )
    ]
    assert values == sorted(values), "rows come in the order of their ranks"
    first = rows(opened, "rank")
    for direction in ("ascending", "descending"):
        click(opened, head)
        assert opened.run(f'document.querySelector({json.dumps(head)}).closest("th").ariaSort') == direction
        assert opened.run('document.querySelectorAll("#board thead th[aria-sort]").length') == 1
        assert rows(opened, "estimator")[-1].startswith("Oracle") and rows(opened, "rank")[-1] == ""
    assert rows(opened, "rank")[:-1] == first[:-1][::-1]
    for n in range(opened.run('document.querySelectorAll("#board > thead button").length')):
        click(opened, "#board > thead button", n)  # every column
        assert rows(opened, "estimator")[-1].startswith("Oracle") and len(rows(opened)) == len(first)


def test_the_filter(opened):
    everything = rows(opened)
    for words, left in (
        ("two words", []),
        ("MDLM duel", ["left_to_right", "greedy", "greedy:k=2"]),
        ("dual", ["greedy"]),
        ("", everything),
    ):
        setting = f'const field = document.getElementById("filter"); field.value = "{words}";'
        opened.run(f'(() => {{ {setting} field.dispatchEvent(new Event("input")) }})()')
        assert sorted(rows(opened)) == sorted(left), words
        assert opened.run('document.getElementById("count").textContent').startswith(f"{len(left)} of ")


def test_everything_works_from_the_keyboard(opened):
    opened.run('document.querySelector("#board thead .k-model button").focus()')
    opened.press("Enter", 13, "\r")
    assert opened.run('document.querySelector("#board thead .k-model").ariaSort') == "ascending"
    opened.run('document.querySelector("#board tr.row .open").focus()')
    opened.press("Enter", 13, "\r")
    assert opened.run('document.querySelector("#board tr.row .open").ariaExpanded') == "true"
    opened.run('document.querySelector("#left .tokens").focus()')
    opened.press("ArrowRight", 39)
    assert "Token 1" in opened.run('document.querySelector("#left .token").textContent')
    opened.run('document.getElementById("step").focus()')
    opened.press("ArrowLeft", 37)
    assert opened.run('document.getElementById("step").value') == "3"
    names = opened.run(
        '[...document.querySelectorAll("button, input, select")].filter((field) => field.checkVisibility() && '
        "!(field.labels?.length || field.ariaLabel || field.textContent.trim() || field.labels?.[0])).length"
    )
    assert names == 0, "every control has a name"


def masked(window, side):
    return window.run(
        f'[...document.querySelectorAll("#{side} .tokens span")].map((s) => s.classList.contains("masked"))'
    )


def test_the_slider_plays_the_unmasking(opened):
    """Blocks of two tokens, one after the other: in each the left order goes forwards, the right one backwards."""
    assert opened.run('document.getElementById("step").max') == "4"
    orders = {"left": [0, 1, 2, 3], "right": [1, 0, 3, 2]}  # which token is revealed at which step
    for step in range(5):
        move = f'const slider = document.getElementById("step"); slider.value = {step};'
        opened.run(f'(() => {{ {move} slider.dispatchEvent(new Event("input")) }})()')
        for side, order in orders.items():
            assert masked(opened, side) == [n not in order[:step] for n in range(4)], (side, step)
    assert "Infinity nats" in opened.run('document.querySelector("#left .sum").textContent')


@pytest.mark.parametrize("width", [360, 500])
def test_on_a_telephone_perplexity_is_seen_without_scrolling(opened, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    opened.call("Emulation.setDeviceMetricsOverride", **size)
    try:
        cells = "#board tr.row td.g-value:not(.plot)"
        ends = f"[...document.querySelectorAll('{cells}')].map(cell => cell.getBoundingClientRect().right)"
        assert 0 < opened.run(f"Math.max(...{ends})") <= width
    finally:
        opened.call("Emulation.clearDeviceMetricsOverride")


def test_a_name_cannot_run_even_as_markup(chromium, page, tmp_path):
    """A second wall: the page's content security policy stops what would get past the escaping."""
    broken = tmp_path / "broken.html"
    text = page.read_text().replace("<main>", "<main><script>window.ran = 1</script><img src=http://127.0.0.1:9/x>")
    broken.write_text(text)
    chromium.open(broken)
    assert chromium.run("window.ran") is None and chromium.problems
    assert not [address for address in chromium.requests if "127.0.0.1:9" in address and not chromium.problems]
