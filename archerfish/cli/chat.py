"""`archerfish chat`: a conversation in the terminal.

Ctrl-c stops the answer. At the prompt, or when it is pressed twice, ctrl-c ends the program.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.background import signals_to
from archerfish.cli.generate import add_adapter_flag, find_adapter, open_engine
from archerfish.cli.interrupts import exit_now
from archerfish.cli.options import Parser, add_options, add_sampling_flags, read_sampling_flags, section
from archerfish.cli.output import Output, print_error, printable, seconds, styled
from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, did_you_mean
from archerfish.text.reasoning import answer_parser

if TYPE_CHECKING:
    from rich.console import Console

    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.outputs import RequestOutput
    from archerfish.params import SamplingParams

DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.95}
COMMANDS = {
    "/help": "this list",
    "/reset": "start a new conversation with the same system message",
    "/system TEXT": "set the system message; without TEXT, show it",
    "/retry": "answer the last message once more",
    "/model NAME": "go on with another model; without NAME, show which one answers",
    "/stats": "show speed and cached tokens of the last answer",
    "/save FILE": "write the conversation as JSON",
    "/quit": "end the program, like ctrl-d",
}
ENDS = {"abort": "(stopped)", "length": "(stopped at --max-tokens)"}  # remarks, by the reason of an end
ReadLine = Callable[[str], str]
Opened = tuple["LLMEngine", "SamplingParams", Any]  # an engine, how its answers are drawn, and its adapter


def add_chat_arguments(parser: Parser) -> None:
    parser.add_argument("message", nargs="?", default="", metavar="MESSAGE", help="a first message")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--plain", action="store_true", help="show answers as they are, without drawing their Markdown")
    add_adapter_flag(parser)
    add_sampling_flags(parser, **DEFAULTS)
    add_options(parser, EngineConfig, HubConfig)


def run_chat(arguments: Namespace, out: Output) -> int:
    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    params = read_sampling_flags(arguments, **DEFAULTS)
    if params.n != 1:
        raise InvalidOptionError("A chat has one answer to each message.", hint="Leave --n at 1.")
    with ExitStack() as stack, line_reader(hub) as read_line:

        def open_model(name: str) -> Opened:
            """The engine of a model, in place of the one before."""
            adapter = arguments.adapter if name == config.model else ""  # which fits no other model
            engine = open_engine(config.replace(model=name), hub, out, adapter)
            stack.close()
            stack.enter_context(engine)
            params = read_sampling_flags(arguments, **{**DEFAULTS, **engine.facts.default_sampling})
            return engine, params, find_adapter(adapter, config)

        chat = Chat(*open_model(config.model), out, read_line, open_model, system=arguments.system)
        chat.draws_markdown = out.is_rich and not arguments.plain
        chat.run(arguments.message)
    return 0


@dataclass
class ChatAnswer:
    """An answer of the model, with its text so far and its timing."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    output: RequestOutput | None = None
    is_stopped: bool = False
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0


@dataclass
class Chat:
    """One conversation."""

    engine: LLMEngine
    params: SamplingParams
    adapter: Any  # of --adapter, as requests take it
    out: Output
    read_line: ReadLine
    open_model: Callable[[str], Opened]
    system: str = ""
    draws_markdown: bool = False
    history: list[dict[str, str]] = field(default_factory=list)
    last: ChatAnswer | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.history]

    def run(self, first: str = "") -> None:
        """Answer messages until the user ends the chat."""
        self.out.note(
            f"{self.engine.model_name}. /help lists the commands; ctrl-c stops an answer, ctrl-d ends the chat."
        )
        line = first
        while True:
            try:
                line = line or self._read_message()
            except (EOFError, KeyboardInterrupt):
                if sys.stdin.isatty():
                    self._write("\n")
                return
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self.run_command(line) if line.startswith("/") else self.answer(line)
            except ArcherfishError as error:
                print_error(error, as_json=self.out.as_json)
            line = ""

    def _read_message(self) -> str:
        """Read a message: one line, and the next line too after a backslash at the end."""
        line = self.read_line("> ")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self.read_line('... ')}"
        return line.strip()

    def answer(self, text: str) -> None:
        """Send a message and show the answer while it is generated. The text of a stopped answer stays in the
        conversation."""
        if not text.strip():
            return
        answer, stop = ChatAnswer(), threading.Event()

        def on_interrupt(*_: object) -> None:
            """Do not interrupt a step; the second ctrl-c ends the process."""
            if stop.is_set():
                exit_now()
            stop.set()

        self.history.append({"role": "user", "content": text})
        try:
            with signals_to(on_interrupt, signal.SIGINT):
                self._stream(answer, stop)
        except KeyboardInterrupt:  # outside of the main thread there is no signal handler
            answer.is_stopped = True
        except ArcherfishError:
            self.history.pop()
            raise
        answer.seconds = time.perf_counter() - answer.started
        self.last = answer
        if answer.text or not answer.is_stopped:
            self.history.append({"role": "assistant", "content": answer.text})
        else:
            self.history.pop()
        self._show_end(answer)

    def _stream(self, answer: ChatAnswer, stop: threading.Event) -> None:
        """Reasoning goes to stderr, as remarks do, and into no message of the conversation."""
        engine, markdown = self.engine, None
        prompt = engine.render_chat(self.messages)
        parser = None if self.params.grammar else answer_parser(engine.tokenizer, engine.chat_template, prompt)
        stream: Any = engine.stream(prompt, engine.chat_template.stopping(self.params), lora_request=self.adapter)
        try:
            for delta in stream:
                is_last = delta.finish_reason is not None
                reasoning, text = ("", delta.text) if parser is None else parser.feed(delta.text, is_last)
                answer.reasoning += reasoning
                is_answer_start = text and not answer.text and answer.reasoning
                self.out.part(printable(reasoning) + ("\n\n" if is_answer_start else ""))
                answer.text += text
                answer.num_tokens += len(delta.token_ids)
                answer.output = delta.output or answer.output
                if text and self.draws_markdown:
                    markdown = markdown or MarkdownWriter()
                    markdown.write(text)
                else:
                    self._write(printable(text))
                if stop.is_set() and not is_last:
                    answer.is_stopped = True
                    break
        finally:
            stream.close()  # aborts a request that still runs
            if markdown is not None:
                markdown.close()

    def _show_end(self, answer: ChatAnswer) -> None:
        output = answer.output
        reason = "abort" if answer.is_stopped else output.finish_reason if output else None
        if self.out.as_json:
            self.out.result(
                {
                    "role": "assistant",
                    "content": answer.text,
                    "reasoning_content": answer.reasoning,
                    "finish_reason": reason,
                    "num_tokens": answer.num_tokens,
                    "num_cached_tokens": output.num_cached_tokens if output else None,
                    "seconds": answer.seconds,
                }
            )
            return
        if not self.draws_markdown:
            self._write("\n")
        if answer.reasoning and not answer.text:
            self.out.part("\n")
        if reason in ENDS:
            self.out.note(ENDS[reason])
        if self.out.is_rich:
            self._write("\n")

    def run_command(self, line: str) -> None:
        """Run a line that begins with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                self.out.table("", ("command", "what it does"), list(COMMANDS.items()))
            case "/reset":
                self.history.clear()
                self.last = None
                self.out.note("A new conversation begins.")
            case "/system":
                self.system = rest or self.system
                self.out.note(f"System message: {self.system or 'none; the chat template may have its own'}")
            case "/retry":
                self.retry()
            case "/model":
                if rest:
                    self.engine, self.params, self.adapter = self.open_model(rest)
                self.out.note(f"{self.engine.model_name} answers.")
            case "/stats":
                self.show_stats()
            case "/save":
                self.save(rest)
            case _:
                known = [command.split()[0] for command in COMMANDS]
                raise InvalidInputError(f"There is no command {name}.", hint=did_you_mean(name, known))

    def retry(self) -> None:
        """Answer the last message of the user again, in place of the last answer."""
        if not any(message["role"] == "user" for message in self.history):
            raise InvalidInputError("There is no message to answer again.")
        if self.history[-1]["role"] == "assistant":
            self.history.pop()
        self.answer(self.history.pop()["content"])

    def show_stats(self) -> None:
        answer = self.last
        if answer is None:
            self.out.note("There is no answer yet.")
            return
        rate = answer.num_tokens / max(answer.seconds, 1e-9)
        rows: list[tuple[str, object]] = [("tokens", answer.num_tokens), ("time", seconds(answer.seconds))]
        rows.append(("tokens/s", f"{rate:.1f}"))
        output = answer.output
        if output is not None:
            rows += [
                ("time to first token", seconds(output.metrics.ttft_ms / 1000)),
                ("prompt tokens", len(output.prompt_token_ids)),
                ("of them cached", output.num_cached_tokens),
            ]
            if output.hit is not None:
                rows.append(("why", output.hit.explain()))
        elif answer.is_stopped:
            rows.append(("ended", "stopped by ctrl-c"))
        self.out.table("", ("last answer", ""), rows)

    def save(self, name: str) -> None:
        from archerfish.store.files import replace_file, write_errors

        if not name:
            raise InvalidInputError("/save needs the name of a file.", hint="For example: /save chat.json")
        path = Path(name).expanduser()
        content = json.dumps({"model": self.engine.model_name, "messages": self.messages}, ensure_ascii=False, indent=2)
        with write_errors(path):
            replace_file(path, content.encode(errors="replace") + b"\n")
        self.out.note(f"Wrote {path}")

    def _write(self, text: str) -> None:
        if not self.out.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()


@contextmanager
def line_reader(hub: HubConfig) -> Iterator[ReadLine]:
    """A function that reads a line. On a terminal, lines can be edited and are kept in a history file."""
    if not sys.stdin.isatty():
        yield lambda prompt: input()
        return
    try:
        import readline
    except ImportError:  # Windows
        yield input
        return
    history = hub.cache_path() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)  # lines

    def read_line(prompt: str) -> str:
        # \001 and \002 mark characters that have no width for readline.
        return input(styled(prompt, "bold").replace("\x1b[1m", "\001\x1b[1m\002").replace("\x1b[0m", "\001\x1b[0m\002"))

    try:
        yield read_line
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


# Markdown on a terminal while it is being generated


def split_blocks(text: str) -> list[str]:
    """Text cut after its empty lines, except those within a fenced block of code. The last part is not finished yet."""
    blocks, is_code = [""], False
    for line in text.splitlines(keepends=True):
        blocks[-1] += line
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        if not line.strip() and line.endswith("\n") and not is_code:
            blocks.append("")
    return blocks


class MarkdownWriter:
    """Draws the block that is being written again with every part of it, and each finished block once."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console()
        self._live = Live(console=self.console, transient=True, auto_refresh=False)
        self._block = ""
        self._live.start()

    def write(self, text: str) -> None:
        from rich.markdown import Markdown

        *finished, self._block = split_blocks(self._block + printable(text))
        for block in finished:
            self.console.print(Markdown(block))  # above the live part
        self._live.update(Markdown(self._block), refresh=True)

    def close(self) -> None:
        from rich.markdown import Markdown

        self._live.stop()
        if self._block.strip():
            self.console.print(Markdown(self._block))
