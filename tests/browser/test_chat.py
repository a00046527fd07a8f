"""Chatting on the page, in Chromium: what a user does, and what is then on the screen. `make test-browser`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from archerfish.serve.app import create_app
from archerfish.serve.client import RemoteError
from archerfish.serve.tenants import Tenants
from archerfish.serve.wire import GenerationRequest
from tests.serve.client import running
from tests.serve.fake_backend import FakeBackend, fake_app
from tests.serve.test_reasoning import ANSWER, QWEN, thinker

from .conftest import FIELD, Chat, expect, said, visiting
from .xss import ELEMENTS, numbered

pytestmark = pytest.mark.browser
SMOLLM2 = "smollm2-135m-instruct"
MARKDOWN = """# Fish

Some *swim*, some **spit** and ~~walk~~ `swim()`:

1. Archerfish
   - in mangroves
2. [Trout](https://fish.example/trout)

| fish | water |
|------|------:|
| pike | fresh |

> Quoted.

```python
print("<b>fish</b>")
```
"""
WATCH = """window.seen = [];  // lengths of an answer while it can be stopped
new MutationObserver(() => {
  const bodies = [...document.querySelectorAll('.message.assistant .body')];
  if (bodies.length && document.querySelector('.composer [aria-label=Stop]')) seen.push(bodies.at(-1).innerText.length);
}).observe(document.querySelector('.messages'), {childList: true, subtree: true, characterData: true}); undefined"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_answer_streams_and_regenerates_from_the_cache(chromium: Any, real: str) -> None:
    """A real model: words come one after another, another answer finds its prompt cached, a reload shows all of it
    again."""
    with visiting(chromium, real) as chat:
        chat.open().set(max_tokens=8, temperature=0.7)
        chat.page.select_option("select[aria-label=Model]", SMOLLM2)
        chat.page.evaluate(WATCH)
        chat.send("Name three fish that live in rivers, please.").wait()
        expect(chat.page.locator(".stats").last).to_contain_text("cut off")
        assert len({length for length in chat.page.evaluate("seen") if length}) > 1
        first, [stats] = chat.texts(), chat.page.locator(".message.assistant .stats").all_inner_texts()
        told = r"8 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s · 0 of \d+ prompt tokens cached · cut off"
        assert re.fullmatch(told, stats)
        chat.button("Another answer").click()
        expect(chat.page.locator(".turner span")).to_have_text("2/2")
        chat.wait()
        stats = chat.page.locator(".message.assistant .stats").last.inner_text()
        found = re.search(r"(\d+) of (\d+) prompt tokens cached", stats)
        assert found is not None and int(found[1]) > int(found[2]) // 2, stats
        second = chat.texts()
        chat.page.reload()
        expect(chat.page.locator(".turner span")).to_have_text("2/2")
        assert chat.texts() == second and chat.page.input_value("select[aria-label=Model]") == SMOLLM2
        chat.button("Branch before").click()
        expect(chat.page.locator(".turner span")).to_have_text("1/2")
        assert chat.texts() == first
        chat.button("Continue the answer").click()
        chat.wait()
        assert chat.texts()[0].startswith(first[0].rstrip()) and len(chat.texts()[0]) > len(first[0])


def test_answer_stops(chat: Chat, backend: FakeBackend) -> None:
    backend.num_before_gate = 2
    backend.gate.clear()
    chat.send("Hi")
    body = chat.page.locator(".message.assistant .body")
    expect(body).to_have_text("Hello th")
    expect(chat.page.locator(".message.running")).to_have_count(1)
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator(".stats").last).to_contain_text("stopped")
    expect(chat.button("Send")).to_be_visible()
    backend.gate.set()
    assert chat.texts() == ["Hello th"]


def test_edit_makes_a_branch(chat: Chat, backend: FakeBackend) -> None:
    backend.reply = lambda request: f"You said {said(request)}."
    chat.say("one").say("two")
    assert chat.texts() == ["You said one.", "You said two."]
    chat.page.focus(FIELD)
    chat.page.keyboard.press("ArrowUp")
    editor = chat.page.locator(".editor textarea")
    assert editor.input_value() == "two"
    editor.fill("three")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator(".message.user .turner span")).to_have_text("2/2")
    chat.wait()
    assert chat.texts() == ["You said one.", "You said three."]
    chat.button("Branch before").click()
    expect(chat.page.locator(".message.assistant .body").last).to_have_text("You said two.")
    chat.page.locator(".message.assistant").first.get_by_role("button", name="Edit the answer").click()
    chat.page.locator(".editor textarea").fill("I say so.")
    chat.button("Keep as a new branch").click()
    assert chat.texts() == ["I say so."]
    chat.say("four")
    prompt = bytes(i if i < 256 else 0 for i in backend.requests[-1].token_ids or []).decode()
    assert "I say so." in prompt and "You said" not in prompt


def test_conversations_are_kept_renamed_and_deleted(chat: Chat) -> None:
    page = chat.page
    chat.say("About fish")
    page.keyboard.press("Alt+n")
    expect(page.locator(".greeting")).to_be_visible()
    chat.say("About birds")
    titles = page.locator(".sidebar .title")
    expect(titles).to_have_text(["About birds", "About fish"])
    page.get_by_role("button", name="Rename About fish").click()
    page.get_by_role("textbox", name="Name").fill("Fish & chips <b>")
    chat.button("Rename").click()
    page.reload()
    expect(titles).to_have_text(["About birds", "Fish & chips <b>"])
    titles.last.click()
    assert chat.texts("user") == ["About fish"]
    page.get_by_role("button", name="Delete Fish").click()
    chat.button("Delete").click()
    expect(titles).to_have_text(["About birds"])
    expect(page.locator(".greeting")).to_be_visible()
    page.reload()
    expect(titles).to_have_text(["About birds"])


def test_export_and_import(chat: Chat, tmp_path: Path) -> None:
    page = chat.page
    chat.say("Hi").say("And?")
    chat.button("Another answer").click()
    expect(page.locator(".turner span")).to_have_text("2/2")
    chat.wait()

    def export(name: str) -> Any:
        with page.expect_download() as download:
            chat.button("Export all").click()
        download.value.save_as(tmp_path / name)
        return json.loads((tmp_path / name).read_text())

    before = export("before.json")
    page.get_by_role("button", name="Delete Hi").click()
    chat.button("Delete").click()
    expect(page.locator(".sidebar .title")).to_have_count(0)
    page.set_input_files("input[type=file]", tmp_path / "before.json")
    expect(page.locator(".turner span")).to_have_text("2/2")
    assert export("after.json") == before
    spoiled = json.dumps(before).replace('"role": "assistant"', '"role": "assistant", "calls": "x"')
    for text, told in (("{}", "The file holds no conversations"), (spoiled, "a conversation that is not whole")):
        (tmp_path / "broken.json").write_text(text)
        page.set_input_files("input[type=file]", tmp_path / "broken.json")
        expect(page.get_by_role("dialog")).to_contain_text(told)
        chat.button("Close").click()
    page.reload()
    expect(page.locator(".turner span")).to_have_text("2/2")


def test_model_output_is_never_html(chat: Chat, backend: FakeBackend) -> None:
    """Red: a script that runs, an element that Markdown does not have, an attribute that acts, a request to another
    host."""
    texts = numbered()
    backend.tokens_per_chunk = 7
    backend.reply = "\n\n---\n\n".join(texts) + "\n\n<think><img src=x onerror='window.hit = 0'></think>"
    chat.say(texts[0])
    page = chat.page
    page.locator(".token, .markdown a").first.hover()
    assert page.evaluate("window.hit ?? null") is None
    found = page.evaluate("""[...document.querySelectorAll('.markdown *')].filter((one) => !one.closest('.code-head'))
      .map((one) => [one.localName, one.className, [...one.attributes].map(({name, value}) => [name, value])])""")
    wrappers = {"div": {"code", "scroll"}}
    for name, kind, attributes in found:
        assert name in ELEMENTS or kind in wrappers.get(name, ()), name
        for attribute, value in attributes:
            assert attribute in {"href", "rel", "target", "class", "tabindex", "role", "aria-label", "start"}, attribute
            assert attribute != "href" or re.match(r"(https?://[\w.]|mailto:)", value), value
            assert attribute != "rel" or "noopener" in value
    assert len(found) > len(texts)
    chat.button("Settings and playground").click()
    chat.button("Tokens").click()
    chat.say(texts[1])
    assert page.evaluate("window.hit ?? null") is None


def test_markdown(chat: Chat, backend: FakeBackend) -> None:
    backend.reply = MARKDOWN
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.say("Tell")
    shown = chat.page.locator(".message.assistant .markdown")
    for selector, text in (
        ("h1", "Fish"),
        ("em", "swim"),
        ("strong", "spit"),
        ("del", "walk"),
        ("p code", "swim()"),
        ("ol > li ul li", "in mangroves"),
        ("a[href='https://fish.example/trout']", "Trout"),
        ("th >> nth=1", "water"),
        ("td.to-right", "fresh"),
        ("blockquote p", "Quoted."),
        ("pre code", 'print("<b>fish</b>")'),
        (".code-head span", "python"),
    ):
        expect(shown.locator(selector)).to_have_text(text)
    shown.get_by_role("button", name="Copy the code").click()
    expect(chat.page.locator("#status")).to_have_text("Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == 'print("<b>fish</b>")'


def test_tokens_and_their_probabilities(chat: Chat, backend: FakeBackend) -> None:
    chat.button("Tokens").click()
    chat.say("Hi")
    assert backend.params()["logprobs"] == 5
    token = chat.page.locator(".token").nth(1)
    expect(token).to_have_text("e")
    token.hover()
    tip = chat.page.locator(".tip")
    expect(tip).to_contain_text("60.7 %")
    expect(tip.locator(".row")).to_have_text([re.compile("e.*60.7 %"), re.compile(r"\?.*22.3 %")])
    chat.page.locator(".tokens[tabindex]").focus()
    chat.page.keyboard.press("ArrowRight")
    expect(chat.page.locator(".token.chosen")).to_have_text("l")
    chat.button("Tokens").click()
    expect(chat.page.locator(".message.assistant .markdown")).to_have_text("Hello there")


def test_settings_are_sent_if_they_are_set(chat: Chat, backend: FakeBackend) -> None:
    chat.say("Hi")
    assert "temperature" not in backend.params() and "top_k" not in backend.params()
    page = chat.page
    page.keyboard.press("Alt+s")
    for name, value in (("temperature", "0.5"), ("top_k", "7"), ("seed", "3")):
        page.get_by_label(name, exact=True).fill(value)
    page.locator("summary", has_text="Length").click()
    page.get_by_label("max_tokens", exact=True).fill("5")
    page.get_by_label("stop", exact=True).fill("END\nSTOP")
    page.get_by_label("System prompt").fill("Be brief.")
    with page.expect_request("**/v1/chat/completions") as request:
        chat.say("Again")
    body = request.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    set_here = {"temperature": 0.5, "top_k": 7, "seed": 3, "max_tokens": 5, "stop": ["END", "STOP"]}
    assert {name: body[name] for name in body.keys() - {"model", "messages", "stream", "stream_options"}} == set_here
    page.get_by_label("top_k", exact=True).fill("1.5")
    page.get_by_label("top_k", exact=True).blur()
    expect(page.get_by_text("Not a whole number.")).to_be_visible()
    expect(page.locator(".field", has_text="temperature")).to_have_attribute(
        "title", re.compile("the most likely token")
    )


def test_json_schema(chat: Chat, backend: FakeBackend) -> None:
    backend.reply = '{"name":"Ann","age":7,"hobbies":[]}'
    page = chat.page
    chat.button("Settings and playground").click()
    page.get_by_text("Playground", exact=True).click()
    page.get_by_role("checkbox", name="JSON schema").check()
    chat.say("A person")
    assert backend.params()["grammar"]["kind"] == "json_schema"
    expect(page.locator(".message.assistant pre")).to_have_text('{\n  "name": "Ann",\n  "age": 7,\n  "hobbies": []\n}')
    expect(page.get_by_text("Valid JSON")).to_be_visible()
    page.get_by_label("JSON schema", exact=True).last.fill("{")
    expect(page.locator(".composer .badge")).to_have_count(0)
    expect(page.get_by_text("Expected property name")).to_be_visible()


def test_tools(chat: Chat, backend: FakeBackend) -> None:
    page = chat.page

    def reply(request: GenerationRequest) -> str:
        return "It is sunny." if b"tool\n21 degrees" in bytes(i for i in request.token_ids or [] if i < 256) else CALL

    backend.reply = reply
    page.keyboard.press("Alt+s")
    page.get_by_text("Playground", exact=True).click()
    page.get_by_role("checkbox", name="Tools").check()
    chat.say("The weather in Rome?")
    expect(page.locator(".call-card")).to_contain_text('"city": "Rome"')
    page.get_by_label("Result of get_weather").fill("21 degrees")
    chat.button("Continue").click()
    expect(page.locator(".message.assistant .body").last).to_have_text("It is sunny.")
    expect(page.locator(".message.tool")).to_contain_text("21 degrees")


def test_reasoning_is_folded(chromium: Any, tmp_path: Path) -> None:
    with running(fake_app(thinker(tmp_path, QWEN, ANSWER))) as served, visiting(chromium, served.url) as chat:
        chat.open().say("Sum?")
        expect(chat.page.locator(".message.assistant .body > .markdown")).to_have_text("Four.")
        fold = chat.page.locator("details.reasoning")
        expect(fold.locator("p")).to_be_hidden()
        fold.locator("summary").click()
        expect(fold.locator("p")).to_have_text(re.compile("Two and\\s*two."))


def test_error_is_shown_in_place(chat: Chat, backend: FakeBackend) -> None:
    backend.fails[1] = RemoteError("The engine process has gone.", status=503, retry_after_s=1.0)
    chat.send("Hi")
    expect(chat.page.get_by_role("alert")).to_contain_text("The engine process has gone.")
    backend.fails.clear()
    chat.button("Try again").click()
    expect(chat.page.locator(".message.assistant .body")).to_have_text("Hello there")
    expect(chat.page.get_by_role("alert")).to_have_count(0)


def test_api_key(chromium: Any, backend: FakeBackend) -> None:
    key = "alice-" + "0123456789" * 3
    app = create_app(backend, credentials="pass", tenants=Tenants.from_text(f"alice={key}"))
    with running(app) as served, visiting(chromium, served.url) as chat:
        page = chat.page
        page.goto(served.url)
        field = page.get_by_role("dialog").get_by_label("API key", exact=True)
        field.fill("wrong")
        chat.button("Use").click()
        expect(page.get_by_role("dialog").get_by_label("API key", exact=True)).to_have_value("wrong")
        field.fill(key)
        page.get_by_label("Remember it in this browser").check()
        chat.button("Use").click()
        page.locator(FIELD).wait_for()
        chat.say("Hi")
        assert chat.texts() == ["Hello there"]
        page.reload()
        page.locator(FIELD).wait_for()
        assert page.evaluate("[localStorage, sessionStorage].map((one) => one.getItem('archerfish.key'))") == [
            key,
            None,
        ]


def test_without_a_model_for_chats(chromium: Any, backend: FakeBackend) -> None:
    backend.cards = [{"id": "lab/vectors", "kind": "embedding", "directory": "", "max_length": 64, "dimension": 4}]
    with running(create_app(backend, credentials="pass")) as served, visiting(chromium, served.url) as chat:
        chat.page.goto(served.url)
        expect(chat.page.locator("nav [aria-current]")).to_have_text("Texts")
        chat.page.get_by_role("link", name="Chat").click()
        expect(chat.page.get_by_role("heading", name="No model for chats is served")).to_be_visible()
