"""How the page looks and loads, in Chromium: layouts, keyboard, accessibility, size. `make test-browser`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import FIELD, Chat, expect, sync_api, visiting

pytestmark = pytest.mark.browser
TABS = ("chat", "texts", "engine", "calls")
SIZES = {"wide": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 640}}
AXE = Path(sync_api.__file__).parents[5] / "node_modules" / "axe-core" / "axe.min.js"
MAX_BYTES = 300_000
TABLE = "|" + "wide|" * 30 + "\n|" + "-|" * 30
LONG = f"A long answer with a_very_long_word_{'x' * 200}\n\n```\n{'y' * 300}\n```\n\n{TABLE}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_layouts(chromium: Any, scripted: str, backend: Any, scheme: str, size: str) -> None:
    """Nothing is wider than the window, in any tab, with a long answer and with the panel open."""
    backend.reply = LONG
    backend.tokens_per_chunk = 50
    with visiting(chromium, scripted, viewport=SIZES[size], color_scheme=scheme, has_touch=size == "phone") as chat:
        page = chat.page
        for tab in TABS:
            chat.open(tab)
            page.locator(f"#tab-{tab} > *").first.wait_for()
            assert width(chat) <= SIZES[size]["width"], tab
        chat.open().say("x" * 300)
        assert width(chat) <= SIZES[size]["width"]
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) is (scheme == "dark")
        chat.button("Settings and playground").click()
        expect(page.get_by_label("temperature", exact=True)).to_be_visible()
        assert width(chat) <= SIZES[size]["width"]
        chat.button("Close the panel").click()
        if size == "phone":
            chat.button("Conversations").click()
            expect(page.locator(".sidebar .title")).to_be_visible()
            page.locator(".sidebar .title").click()
            expect(page.locator(".sidebar")).to_be_hidden()
        chat.button("Light or dark").click()
        assert page.evaluate("document.documentElement.dataset.theme") != scheme
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") != scheme


def width(chat: Chat) -> int:
    """The width of what the page shows, which only code and tables scroll inside."""
    found: int = chat.page.evaluate("""Math.max(document.documentElement.scrollWidth,
      ...[...document.querySelectorAll('main, main > section, .chat, .thread, .panel')].map((one) =>
        one.scrollWidth > one.clientWidth + 1 ? 1e6 : 0))""")
    return found


def test_keyboard_alone(chat: Chat) -> None:
    """Every control is reached by Tab, and what the shortcuts promise happens."""
    page = chat.page
    expect(page.locator(FIELD)).to_be_focused()
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("N, not a shortcut?")
    page.keyboard.press("Enter")
    chat.wait()
    assert chat.texts("user") == ["First line\nN, not a shortcut?"]
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        )
    names = (
        "Chat",
        "Calls",
        "API key",
        "New chat",
        "Import",
        "Model",
        "Settings and playground",
        "Another answer",
        "Edit and send",
        "Copy the message",
        "Your message",
        "Tokens",
        "Send",
        "Rename First line N, not a shortcut?",
    )
    for name in names:
        assert name in reached, (name, reached)
    page.keyboard.press("Alt+4")
    expect(page.locator("#tab-calls .call").first).to_be_visible()
    page.keyboard.press("Alt+1")
    page.keyboard.press("Alt+r")
    expect(page.locator(".turner span")).to_have_text("2/2")
    chat.wait()
    page.keyboard.press("Alt+n")
    expect(page.locator(".greeting")).to_be_visible()
    page.keyboard.press("Alt+s")
    expect(page.locator(".panel")).to_be_visible()
    page.keyboard.press("Alt+s")
    expect(page.locator(".panel")).to_be_hidden()
    page.locator("nav a").first.focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_have_count(0)
    page.keyboard.press("/")
    expect(page.locator(FIELD)).to_be_focused()


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium: Any, scripted: str, scheme: str) -> None:
    with visiting(chromium, scripted, color_scheme=scheme) as chat:
        page = chat.page
        chat.open().say("Hi")
        chat.button("Tokens").click()
        chat.say("And?")
        page.keyboard.press("Alt+s")
        page.locator("summary", has_text="Scheduling").click()
        check(chat, "chat and settings")
        page.get_by_text("Playground", exact=True).click()
        check(chat, "playground")
        page.get_by_role("button", name="API key").click()
        check(chat, "dialog")
        page.keyboard.press("Escape")
        page.keyboard.press("Alt+n")
        check(chat, "empty chat")
        for tab in TABS[1:]:
            chat.open(tab)
            page.locator(f"#tab-{tab} > *").first.wait_for()
            check(chat, tab)
        page.goto(f"{scripted}/docs")
        check(chat, "docs")


def check(chat: Chat, where: str) -> None:
    chat.page.evaluate(AXE.read_text() + "; undefined")
    found = chat.page.evaluate("axe.run(document)")["violations"]
    told = [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in found]
    assert not told, (where, told)


def test_size_and_first_paint(chromium: Any, real: str, capsys: pytest.CaptureFixture[str]) -> None:
    with visiting(chromium, real) as chat:
        paints = []
        for _ in range(5):
            chat.open()
            paints.append(
                chat.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 1e6")
            )
            chat.page.goto("about:blank")
    sizes: list[int] = []
    with visiting(chromium, real) as chat:  # a fresh profile, without a cache
        chat.page.on("response", lambda answer: sizes.append(int(answer.headers.get("content-length", 0))))
        for tab in TABS:
            chat.open(tab)
            chat.page.locator(f"#tab-{tab} > *").first.wait_for()
    with capsys.disabled():
        print(f"\nfirst contentful paint: {sorted(round(one) for one in paints)} ms, all tabs: {sum(sizes):,} bytes")
    assert len(sizes) > 20 and sum(sizes) < MAX_BYTES
