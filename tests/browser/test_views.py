"""The page's views of texts and of the engine, in Chromium, over a real server. `make test-browser`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from archerfish.serve.calls import RANK
from tests.browser.conftest import Chat, expect, visiting
from tests.browser.test_look import AXE, check

pytestmark = pytest.mark.browser
PHONE = {"width": 360, "height": 640}
LINES = ["An archerfish spits water.", "A fish shoots at flies.", "Bread needs yeast.", "Yeast makes dough rise."]
WRITER, VECTORS = "smollm2-135m-instruct", "all-minilm-l6-v2"
PROMPT = (
    "The museum of fish is open every day, and its guide answers all questions about water and its animals. Question: "
)


@pytest.fixture(params=["light", "dark"])
def visit(request: pytest.FixtureRequest, chromium: Any, real: str) -> Any:
    with visiting(chromium, real, color_scheme=request.param) as made:
        yield made


def fill_and_run(page: Any, panel: str, label: str, lines: Sequence[str]) -> None:
    page.get_by_text(panel, exact=True).first.click()
    page.get_by_label(label).fill("\n".join(lines))
    page.locator(".job:visible button.primary").click()


def check_axe(visit: Chat, where: str) -> None:
    if AXE.is_file():
        check(visit, where)


def check_width(page: Any) -> None:
    assert page.evaluate(
        "[...document.querySelectorAll('main > section')].every((one) => one.scrollWidth <= one.clientWidth)"
    )


def test_texts(visit: Any, real: str) -> None:
    page = visit.open("texts").page
    fill_and_run(page, "Compare", "Texts, one a line", LINES)
    cells = page.locator(".heat td[data-value]")
    expect(cells).to_have_count(16)
    answer = httpx.post(f"{real}/v1/embeddings", json={"model": VECTORS, "input": LINES}, timeout=60).json()["data"]
    rows = np.array([one["embedding"] for one in answer])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = (rows @ rows.T).ravel()
    shown = [float(text) for text in cells.all_inner_texts()]
    np.testing.assert_allclose(shown, expected, atol=0.011)  # two decimals, and batches of other sizes
    exact = cells.evaluate_all("(all) => all.map((one) => Number(one.dataset.value))")
    np.testing.assert_allclose(exact, expected, atol=5e-3)
    shares = cells.evaluate_all("(all) => all.map((one) => Number(one.style.getPropertyValue('--share')))")
    others = [i for i in range(16) if i % 5]
    assert np.argmax(expected[others]) == np.argmax(np.array(shares)[others]) and max(shares) == 1
    check_axe(visit, "compare")

    page.get_by_text("Rerank", exact=True).first.click()
    page.get_by_label("Query").fill(RANK["query"])
    fill_and_run(page, "Rerank", "Documents, one a line", RANK["documents"])
    ranks = page.locator(".ranks li")
    expect(ranks).to_have_count(len(RANK["documents"]))
    results = httpx.post(f"{real}/v1/rerank", json={"model": VECTORS, **RANK}, timeout=60).json()["results"]
    expect(ranks.first.locator(".text")).to_have_text(RANK["documents"][results[0]["index"]])
    expect(ranks.first.locator(".score")).to_have_text(f"{results[0]['relevance_score']:.3f}")
    check_axe(visit, "rerank")
    page.set_viewport_size(PHONE)
    check_width(page)


def test_map_of_a_file(visit: Any) -> None:
    page = visit.open("texts").page
    fill_and_run(page, "Map", "Lines to map", LINES[:2])
    expect(page.locator(".job:visible .error")).to_contain_text("at least three lines")
    lines = [f"{LINES[number % 4]} Number {number}." for number in range(150)]  # several requests
    file = {"name": "lines.txt", "mimeType": "text/plain", "buffer": "\n".join(lines).encode()}
    page.locator(".texts input[type=file]").set_input_files(file)
    expect(page.get_by_label("Lines to map")).to_have_value("\n".join(lines))
    page.locator(".job:visible button.primary").click()
    canvas = page.locator("canvas.points")
    expect(canvas).to_have_attribute("aria-label", "A map of 150 lines", timeout=120_000)
    expect(page.locator(".job:visible .error")).to_have_count(0)
    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".line")).to_have_text(lines[0])
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".line")).to_have_text(lines[-1])
    check_axe(visit, "map")
    page.set_viewport_size(PHONE)
    check_width(page)


def figure(page: Any, title: str) -> Any:
    return page.locator(".figure", has=page.get_by_text(title, exact=True)).locator("strong")


def complete(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": WRITER, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    found: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    return found


def test_engine_moves_under_load_and_says_why_requests_hit(
    visit: Any, real: str, request: pytest.FixtureRequest
) -> None:
    page = visit.open("engine").page
    page.get_by_label("Model").select_option(WRITER)
    expect(page.locator(".engine .badge.good").first).to_have_text("live")
    question = PROMPT + request.node.name
    threads = [threading.Thread(target=complete, args=(real, question + str(number), 60)) for number in range(3)]
    for thread in threads:
        thread.start()
    expect(figure(page, "Running")).not_to_have_text("0")
    expect(page.locator(".legend")).to_contain_text("Running")
    expect(figure(page, "Tokens / s")).not_to_have_text("0.0")
    for thread in threads:
        thread.join()
    expect(figure(page, "First token")).to_contain_text("s")
    expect(figure(page, "Running")).to_have_text("0")
    complete(real, question + "0", 1)
    first = page.locator(".engine tbody tr").first
    expect(first.locator(".badge")).to_have_text("hit")
    expect(page.locator(".engine tbody tr.why").first).to_contain_text("came from the cache")
    expect(page.locator(".legend")).to_contain_text("Cached")
    page.locator(".tree button", has_text="The museum of fish").first.click()
    expect(page.locator(".node pre")).to_contain_text("The museum of fish is open every day")
    expect(page.locator(".node dl")).to_contain_text("Hits")
    check_axe(visit, "engine")
    page.set_viewport_size(PHONE)
    check_width(page)


def test_engine_view_recovers_by_itself(chromium: Any, real: str) -> None:
    """It stops asking while its tab is hidden, and goes on after errors."""
    with visiting(chromium, real) as visit:
        page = visit.page
        asked: list[str] = []
        away = {"error": {"message": "The engine is away."}}
        page.route("**/v1/cache/view*", lambda route: route.fulfill(status=503, json=away))
        visit.open("engine")
        expect(page.locator(".problem-line")).to_contain_text("The engine is away.")
        check_axe(visit, "away")
        page.unroute("**/v1/cache/view*")
        expect(page.locator(".engine .badge.good").first).to_have_text("live")
        expect(page.locator(".problem-line")).to_be_hidden()
        page.locator("nav a", has_text="Chat").click()
        expect(page.locator("#tab-engine")).to_be_hidden()
        page.on("request", lambda one: asked.append(one.url) if "cache/view" in one.url else None)
        count = len(asked)
        page.wait_for_timeout(1500)
        assert len(asked) == count
        page.locator("nav a", has_text="Engine").click()
        with page.expect_request("**/v1/cache/view*"):
            pass
