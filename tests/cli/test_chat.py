"""`archerfish chat` with a fake engine and typed lines; ctrl-c as a real signal."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from archerfish.cli import chat
from archerfish.cli.main import main
from archerfish.cli.output import Output
from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import InputTooLargeError, ModelNotFoundError
from archerfish.text.chat_template import ChatTemplate
from tests.cli.fake_llm import FakeLLM

Typed = list[str | type[BaseException]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    def open_engine(config: EngineConfig, hub: HubConfig, out: Output, adapter: str = "") -> FakeLLM:
        if config.model == "missing":
            raise ModelNotFoundError("There is no model 'missing'.")
        fake.models.append(config.model)
        return fake

    monkeypatch.setattr(chat, "open_engine", open_engine)
    return fake


@pytest.fixture
def talk(engine: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Type lines (or raise what a key raises) and get (exit code, stdout, stderr)."""

    def run(typed: Typed, *flags: str) -> tuple[int, str, str]:
        left = list(typed)

        def read_line(prompt: str) -> str:
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            raise line

        @contextmanager
        def reader(hub: HubConfig) -> Iterator[Callable[[str], str]]:
            yield read_line

        monkeypatch.setattr(chat, "line_reader", reader)
        code = main(["chat", *flags])
        shown = capsys.readouterr()
        assert left == [], "the chat ended before all was typed"
        return code, shown.out, shown.err

    return run


def test_an_adapter_answers(talk: Callable[..., Any], engine: FakeLLM) -> None:
    typed: Typed = ["hello", "/model other", "hello"]
    assert talk(typed, "--lora-modules", "mine=/adapters/mine", "--adapter", "mine")[0] == 0
    assert engine.adapters == ["mine", None]  # it fits no other model


def roles(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_conversation_history(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    code, out, err = talk(["Hi", "", "and you?"], "--system", "Be kind.")
    assert code == 0 and out == "echo Hi\necho and you?\n" and "/help" in err
    assert roles(engine.prompts[1]) == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "echo Hi"),
        ("user", "and you?"),
    ]
    assert engine.is_closed and engine.params[0].temperature == 0.7


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt, "/quit"])
def test_ctrl_c_and_ctrl_d_at_the_prompt_end_the_chat(engine: FakeLLM, talk: Callable[..., Any], key: Any) -> None:
    assert talk(["Hi", key])[0] == 0
    assert engine.is_closed and engine.num_aborted == 0


def test_ctrl_c_stops_only_the_answer(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    def press(number: int) -> None:
        if number == 2 and len(engine.prompts) == 1:
            signal.raise_signal(signal.SIGINT)

    engine.on_word = press
    before = signal.getsignal(signal.SIGINT)
    code, out, err = talk(["a b c d e", "next"])
    assert code == 0 and out == "echo a b \necho next\n" and "(stopped)" in err
    assert engine.num_aborted == 1
    assert roles(engine.prompts[1])[:2] == [("user", "a b c d e"), ("assistant", "echo a b ")]
    assert signal.getsignal(signal.SIGINT) is before


def test_answer_stopped_before_its_first_word_is_forgotten(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    def press(number: int) -> None:
        if len(engine.prompts) == 1:
            raise KeyboardInterrupt

    engine.on_word = press
    assert talk(["a", "b"])[0] == 0
    assert roles(engine.prompts[1]) == [("user", "b")]


def test_chat_goes_on_after_an_error(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    engine.error = InputTooLargeError("The prompt is too long.", hint="Shorten it.")
    code, out, err = talk(["long", "/reset"])
    assert code == 0 and out == "" and "The prompt is too long." in err and "Shorten it." in err
    engine.error = None
    talk(["short"], "long")
    assert roles(engine.prompts[-1])[-1] == ("user", "short")


def test_commands(engine: FakeLLM, talk: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    _, out, err = talk(
        [
            "/stats",
            "/system Speak German.",
            "Hallo du",
            "/stats",
            f"/save {file}",
            "/reset",
            "/stats",
            "Wieder",
            "/help",
            "/sytem x",
            "/save",
            "/system",
            f"/save {tmp_path / 'no' / 'such'}",
        ]
    )
    assert err.count("There is no answer yet.") == 2
    assert "tokens/s" in out and "12.0 ms" in out and "have not been seen before" in out
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved["model"] == "fake/llm"
    assert roles(saved["messages"]) == [
        ("system", "Speak German."),
        ("user", "Hallo du"),
        ("assistant", "echo Hallo du"),
    ]
    assert roles(engine.prompts[1]) == [("system", "Speak German."), ("user", "Wieder")]
    assert all(command.split()[0] in out for command in chat.COMMANDS)
    assert "'/system'" in err and "needs the name of a file" in err and "System message: Speak German." in err
    assert "Cannot write" in err


def test_retry_answers_the_last_message_again(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    _, out, err = talk(["/retry", "Hi", "/retry", "and you?"])
    assert out == "echo Hi\necho Hi\necho and you?\n" and "no message to answer again" in err
    assert [roles(prompt) for prompt in engine.prompts[:2]] == [[("user", "Hi")], [("user", "Hi")]]
    assert roles(engine.prompts[2]) == [("user", "Hi"), ("assistant", "echo Hi"), ("user", "and you?")]


def test_another_model_goes_on_with_the_conversation(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    code, _, err = talk(["Hi", "/model other", "/model missing", "/model", "and you?"])
    assert code == 0 and engine.models == ["smollm2-135m-instruct", "other"]
    assert "no model 'missing'" in err and err.count("fake/llm answers.") == 2
    assert len(engine.prompts[1]) == 3


@pytest.mark.parametrize("is_opened", [False, True])  # by the template
def test_reasoning_is_set_apart_from_the_answer(is_opened: bool, engine: FakeLLM, talk: Callable[..., Any]) -> None:
    """It must not come back with the next message either."""
    engine.chat_template = ChatTemplate("<think>")
    engine.tokenizer = SimpleNamespace(
        token_to_id=lambda name: None,
        decode=lambda ids, skip_special_tokens: "assistant\n<think>\n" if is_opened else "",
    )
    engine.reply = f"{'' if is_opened else '<think>'} Two and two. </think> Four, of course."
    _, out, err = talk(["2+2?", "Sure?"], "--system", "Be brief.")
    assert out == "Four, of course.\n" * 2 and err.endswith("Two and two.\n\n" * 2)
    assert roles(engine.prompts[1])[2] == ("assistant", "Four, of course.")
    _, out, err = talk(["2+2?"], "--json")
    [answer] = map(json.loads, out.splitlines())
    assert (answer["content"], answer["reasoning_content"]) == ("Four, of course.", "Two and two.") and "Two" not in err
    engine.reply = engine.reply.partition("</think>")[0]  # cut off
    assert talk(["2+2?"])[1:] == ("\n", f"{talk([])[2]}Two and two.\n")


def test_markdown_is_drawn_block_by_block() -> None:
    assert chat.split_blocks("a\nb\n\n```\nx\n\ny\n```\nc\n\nd") == ["a\nb\n\n", "```\nx\n\ny\n```\nc\n\n", "d"]
    shown = io.StringIO()
    writer = chat.MarkdownWriter(Console(file=shown, force_terminal=True, width=40))
    for part in ("**Bo", "ld**\n", "\n- one\n- t", "wo\x1b[2J"):
        writer.write(part)
    writer.close()
    last = shown.getvalue().rpartition("Bold")[2]
    assert "\x1b[1mBold\x1b[0m" in shown.getvalue() and " • " in last and "two" in last
    assert "**" not in last and "\x1b[2J" not in shown.getvalue()


def test_json_lines_and_backslashes(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    talk(["one\\", "two"])
    assert roles(engine.prompts[0]) == [("user", "one\ntwo")]
    _, out, _ = talk(["Hi"], "--json")
    answer = json.loads(out)
    assert (answer["role"], answer["content"], answer["finish_reason"]) == ("assistant", "echo Hi", "stop")
    assert answer["num_cached_tokens"] == 1


def test_first_message_and_refused_n(engine: FakeLLM, talk: Callable[..., Any]) -> None:
    assert talk([], "Hello")[1] == "echo Hello\n"
    assert main(["chat", "--n", "2"]) == 2


def test_piped_lines(engine: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo"))
    assert main(["chat", "--quiet"]) == 0
    assert capsys.readouterr() == ("echo one\necho two\n", "")


def test_line_history_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: readline.add_history("typed") or "typed")
    hub = HubConfig(cache_dir=str(tmp_path / "cache"))
    with chat.line_reader(hub) as read_line:
        assert read_line("> ") == "typed"
    assert (tmp_path / "cache" / "chat_history").read_text().endswith("typed\n")
    readline.clear_history()
    with chat.line_reader(hub):
        assert readline.get_history_item(readline.get_current_history_length()) == "typed"
