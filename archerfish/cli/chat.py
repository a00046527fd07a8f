"""`archerfish chat`: a conversation in the terminal. Ctrl-c stops the answer; at the prompt, or a second time, it leaves."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from archerfish.cli.interrupts import leave
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, print_error, printable, seconds, styled
from archerfish.cli.sampling_flags import add_sampling_flags, open_engine, read_sampling_flags
from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, did_you_mean

if TYPE_CHECKING:
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.outputs import RequestOutput
    from archerfish.params import SamplingParams

DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.95}
MAX_HISTORY_LINES = 1000
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation, but not the system message",
    "/system TEXT": "set the system message; without TEXT show it",
    "/stats": "figures of the last answer: tokens/s, cached tokens and why",
    "/save FILE": "write the conversation as JSON",
    "/quit": "leave; so do ctrl-d, and ctrl-c at the prompt",
}
ReadLine = Callable[[str], str]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("message", nargs="?", default="", metavar="MESSAGE", help="a first message")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    add_sampling_flags(parser, **DEFAULTS)
    add_options(parser, EngineConfig, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    params = read_sampling_flags(arguments, **DEFAULTS)
    if params.n != 1:
        raise InvalidOptionError("A chat has one answer at a time.", hint="Leave --n at 1.")
    with open_engine(config, hub, out) as engine, line_reader(hub) as read_line:
        Chat(engine, params, out, read_line, system=arguments.system).run(arguments.message)
    return 0


class Chat:
    """One conversation."""

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, out: Output, read_line: ReadLine, *, system: str = ""
    ) -> None:
        self.engine, self.params, self.out = engine, params, out
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.last: Turn | None = None
        self._read_line = read_line

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def run(self, first: str = "") -> None:
        """Answer until the user leaves."""
        self.out.note(f"{self.engine.model_name}. /help shows the commands; ctrl-c stops an answer, ctrl-d leaves.")
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
                self.obey(line) if line.startswith("/") else self.answer(line)
            except ArcherfishError as error:
                print_error(error, as_json=self.out.as_json)
            line = ""

    def _read_message(self) -> str:
        """A line; one that ends with a backslash goes on in the next."""
        lines: list[str] = []
        while True:
            line = self._read_line("... " if lines else "> ")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines).strip()

    def answer(self, text: str) -> None:
        """Send a message and show the answer as it comes. One that is stopped stays in the conversation as far as it came."""
        if not text.strip():
            return
        turn = Turn()
        self.turns.append({"role": "user", "content": text})
        try:
            with Interrupt() as interrupt:
                self._stream(turn, interrupt)
        except KeyboardInterrupt:  # from where no signal handler can be set
            turn.is_stopped = True
        except ArcherfishError:
            self.turns.pop()
            raise
        turn.finished = time.perf_counter()
        self.last = turn
        if turn.text or not turn.is_stopped:
            self.turns.append({"role": "assistant", "content": turn.text})
        else:
            self.turns.pop()
        self._end(turn)

    def _stream(self, turn: Turn, interrupt: Interrupt) -> None:
        stream: Any = self.engine.stream_chat(self.messages, self.params)
        try:
            for delta in stream:
                turn.add(delta)
                if not self.out.as_json:
                    self._write(printable(delta.text))
                if interrupt.is_set and delta.finish_reason is None:
                    turn.is_stopped = True
                    break
        finally:
            stream.close()  # aborts the request, if it still runs

    def _end(self, turn: Turn) -> None:
        if self.out.as_json:
            output = turn.output
            reason = "abort" if turn.is_stopped else output.finish_reason if output else None
            num_cached = output.num_cached_tokens if output else None
            self.out.result({
                "role": "assistant", "content": turn.text, "finish_reason": reason, "num_tokens": turn.num_tokens,
                "num_cached_tokens": num_cached, "seconds": turn.seconds,
            })
            return
        self._write("\n")
        if turn.is_stopped:
            self.out.note("(stopped)")
        elif turn.output is not None and turn.output.finish_reason == "length":
            self.out.note("(cut at its length; --max-tokens sets it)")
        if self.out.is_rich:
            self._write("\n")

    def obey(self, line: str) -> None:
        """A line that begins with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                self.out.table("", ("command", "what it does"), list(COMMANDS.items()))
            case "/reset":
                self.turns.clear()
                self.last = None
                self.out.note("The conversation begins anew.")
            case "/system":
                if rest:
                    self.system = rest
                self.out.note(f"System message: {self.system or 'none; the model may have one of its own'}")
            case "/stats":
                self.show_stats()
            case "/save":
                self.save(rest)
            case _:
                known = [command.split()[0] for command in COMMANDS]
                raise InvalidInputError(f"There is no command {name}.", hint=did_you_mean(name, known))

    def show_stats(self) -> None:
        turn = self.last
        if turn is None:
            self.out.note("There is no answer yet.")
            return
        rate = turn.num_tokens / max(turn.seconds, 1e-9)
        rows: list[tuple[str, object]] = [("tokens", turn.num_tokens), ("time", seconds(turn.seconds))]
        rows.append(("tokens/s", f"{rate:.1f}"))
        output = turn.output
        if output is not None:
            rows += [
                ("time to first token", seconds(output.metrics.ttft_ms / 1000)),
                ("prompt tokens", len(output.prompt_token_ids)),
                ("of them cached", output.num_cached_tokens),
            ]
            if output.hit is not None:
                rows.append(("why", output.hit.explain()))
        elif turn.is_stopped:
            rows.append(("ended", "stopped by ctrl-c"))
        self.out.table("", ("last answer", ""), rows)

    def save(self, name: str) -> None:
        if not name:
            raise InvalidInputError("/save needs the name of a file.", hint="For example: /save chat.json")
        from archerfish.cli.texts import write_atomically

        path = Path(name).expanduser()
        content = json.dumps({"model": self.engine.model_name, "messages": self.messages}, ensure_ascii=False, indent=2)

        def write(file: BinaryIO) -> None:
            file.write(content.encode(errors="replace") + b"\n")

        write_atomically(path, write)
        self.out.note(f"Wrote {path}")

    def _write(self, text: str) -> None:
        if not self.out.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()


class Turn:
    """One answer while it comes, and its figures."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.finished = self.started
        self.num_tokens = 0
        self.output: RequestOutput | None = None
        self.is_stopped = False
        self._pieces: list[str] = []

    def add(self, delta: Any) -> None:
        self._pieces.append(delta.text)
        self.num_tokens += len(delta.token_ids)
        self.output = delta.output or self.output

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def seconds(self) -> float:
        return self.finished - self.started


class Interrupt:
    """Ctrl-c as something to look at, so that it does not fall into the middle of a step; a second one ends the process."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.is_set:
            leave()
        self.is_set = True


@contextmanager
def line_reader(hub: HubConfig) -> Iterator[ReadLine]:
    """Reads lines: with editing and a history that is kept, on a terminal; else from standard input."""
    if not sys.stdin.isatty():
        yield read_piped
        return
    try:
        import readline
    except ImportError:  # Windows
        yield input
        return
    history = hub.cache_path() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(MAX_HISTORY_LINES)
    readline.set_auto_history(True)

    def read_line(prompt: str) -> str:
        # \001 and \002 tell readline which characters take no room.
        return input(styled(prompt, "bold").replace("\x1b[1m", "\001\x1b[1m\002").replace("\x1b[0m", "\001\x1b[0m\002"))

    try:
        yield read_line
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def read_piped(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")
