"""`archerfish tts`: TTS tokens for texts, one JSON object per line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, seconds
from archerfish.cli.sampling_flags import open_engine
from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import InvalidInputError, NotFoundError

PREFIX = "tts."
NUMBERS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0: the most likely tokens; higher: more varied"), "top_p": (float, "draw from this share"),
    "top_k": (int, "draw from this many of the likeliest"), "max_tokens": (int, "most semantic tokens; 50 are a second"),
    "seed": (int, "makes the draws repeatable"),
}  # fmt: skip


def add_arguments(parser: Parser) -> None:
    from archerfish.engine.tts import PROPERTIES, TTSRequest

    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to speak; without any, the lines of standard input")
    parser.add_argument(
        "--input", default="", metavar="FILE",
        help='file with a text per line, or .jsonl with "text" and other fields of a request; - is standard input',
    )  # fmt: skip
    parser.add_argument("--reference", default="", metavar="FILE", help="speak with the voice of a line of this command")
    group = parser.add_argument_group("voice and sampling")
    for spec in dataclasses.fields(TTSRequest):
        keywords: dict[str, Any] = {"dest": PREFIX + spec.name, "default": argparse.SUPPRESS}
        flag = "--" + spec.name.replace("_", "-")
        if spec.name in PROPERTIES:
            names = ", ".join(PROPERTIES[spec.name])
            group.add_argument(flag, metavar="NAME", help=f"one of {names} (default: {spec.default})", **keywords)
        elif spec.name in NUMBERS:
            kind, meaning = NUMBERS[spec.name]
            group.add_argument(flag, metavar="X" if kind is float else "N", type=kind, help=meaning, **keywords)
    add_options(parser, EngineConfig, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    from archerfish.engine.rwkv_sampler import RwkvSampler
    from archerfish.engine.tts import TTSRequest

    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    voice = {key.removeprefix(PREFIX): value for key, value in vars(arguments).items() if key.startswith(PREFIX)}
    if arguments.reference:
        voice |= read_voice(Path(arguments.reference))
    TTSRequest(text="any", **voice)  # raises the errors that all requests would have, before the model is loaded
    requests = [{**voice, **entry} for entry in gather_entries(arguments)]
    with open_engine(config, hub, out) as engine:
        started = time.perf_counter()
        found = RwkvSampler(engine).generate_tts_tokens_batch(requests)
        elapsed_s = time.perf_counter() - started
    for text, tokens in zip((request.get("text") for request in requests), found, strict=True):
        if tokens.error is not None:
            out.note(f"Failed: {tokens.error}")
        shown = {"text": text, "global_tokens": tokens.global_tokens, "semantic_tokens": tokens.semantic_tokens}
        ended = {"finish_reason": tokens.finish_reason, "seconds": tokens.seconds}
        out.result({**shown, **ended} if tokens.error is None else {**shown, **ended, "error": str(tokens.error)})
    spoken_s = sum(tokens.seconds for tokens in found)
    out.note(f"{config.model}: {seconds(spoken_s)} of audio in {seconds(elapsed_s)}")
    return 1 if any(tokens.error is not None for tokens in found) else 0


def gather_entries(arguments: Namespace) -> list[dict[str, Any]]:
    """The fields of each request: the text, and the other fields of its line in a .jsonl file."""
    from archerfish.cli.texts import gather_texts, is_json, read_json

    path = Path(arguments.input)
    if not is_json(path):
        return [{"text": text} for text in gather_texts(arguments.texts, arguments.input)]
    entries: list[dict[str, Any]] = [{"text": text} for text in arguments.texts]
    for number, entry in read_json(path):
        if not isinstance(entry, dict):
            raise InvalidInputError(f"Line {number} of {path} is not a JSON object.")
        entries.append(entry)
    return entries


def read_voice(path: Path) -> dict[str, Any]:
    """The voice in the first line of a file."""
    try:
        with path.open(encoding="utf-8") as file:
            entry = json.loads(file.readline())
        return {"ref_global_tokens": entry["global_tokens"], "ref_semantic_tokens": entry["semantic_tokens"]}
    except FileNotFoundError:
        raise NotFoundError(f"The reference {path} does not exist.") from None
    except OSError as error:
        raise InvalidInputError(f"The reference {path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError):
        hint = "`archerfish tts` writes such lines."
        raise InvalidInputError(f"{path} does not begin with global_tokens and semantic_tokens in JSON.", hint=hint) from None
