"""`archerfish tts`: TTS tokens for texts, one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from archerfish.cli.generate import open_engine
from archerfish.cli.options import SAMPLING, Parser, add_flag, add_options, section, values_of
from archerfish.cli.output import Output, seconds
from archerfish.cli.texts import gather_entries, read_entries
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.tts import PROPERTIES, TTSRequest
from archerfish.errors import InvalidInputError

NUMBERS = {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed")}
NUMBERS["max_tokens"] = "most semantic tokens; 50 are a second"


def add_tts_arguments(parser: Parser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to speak; without any, the lines of standard input")
    parser.add_argument(
        "--input", default="", metavar="FILE",
        help='file with a text per line, or .jsonl with "text" and other fields of a request; - is standard input',
    )  # fmt: skip
    parser.add_argument("--reference", default="", metavar="FILE", help="speak with the voice of a line of this command")
    group = parser.add_argument_group("voice and sampling")
    for spec in dataclasses.fields(TTSRequest):
        if spec.name in PROPERTIES:
            text = f"one of {', '.join(PROPERTIES[spec.name])} (default: {spec.default})"
            add_flag(group, f"tts.{spec.name}", spec.default, help=text, metavar="NAME")
        elif spec.name in NUMBERS:
            metavar, kind = ("X", float) if spec.name in ("temperature", "top_p") else ("N", int)
            add_flag(group, f"tts.{spec.name}", spec.default, help=NUMBERS[spec.name], metavar=metavar, type=kind)
    add_options(parser, EngineConfig, HubConfig)


def run_tts(arguments: Namespace, out: Output) -> int:
    from archerfish.engine.rwkv_sampler import RwkvSampler

    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    voice = values_of("tts.", arguments)
    if arguments.reference:
        voice |= read_voice(Path(arguments.reference))
    TTSRequest(text="any", **voice)  # raises the errors that all requests would have, before the model is loaded
    requests: list[dict[str, Any]] = []
    for place, entry in gather_entries(arguments.texts, arguments.input):
        if not isinstance(entry, str | dict):
            raise InvalidInputError(f"{place} is not a JSON object.")
        requests.append(voice | ({"text": entry} if isinstance(entry, str) else entry))
    with open_engine(config, hub, out) as engine:
        started = time.perf_counter()
        found = RwkvSampler(engine).generate_tts_tokens_batch(requests)
        elapsed_s = time.perf_counter() - started
    for request, tokens in zip(requests, found, strict=True):
        shown = {
            "text": request.get("text"), "global_tokens": tokens.global_tokens, "semantic_tokens": tokens.semantic_tokens,
            "finish_reason": tokens.finish_reason, "seconds": tokens.seconds,
        }  # fmt: skip
        if tokens.error is not None:
            out.note(f"Failed: {tokens.error}")
            shown["error"] = str(tokens.error)
        out.result(shown)
    spoken_s = sum(tokens.seconds for tokens in found)
    out.note(f"{config.model}: {seconds(spoken_s)} of audio in {seconds(elapsed_s)}")
    return 1 if any(tokens.error is not None for tokens in found) else 0


def read_voice(path: Path) -> dict[str, Any]:
    """The voice in the first line of a file."""
    try:
        _, line = next(read_entries(path))
        entry = json.loads(line) if isinstance(line, str) else line
        return {"ref_global_tokens": entry["global_tokens"], "ref_semantic_tokens": entry["semantic_tokens"]}
    except (StopIteration, json.JSONDecodeError, TypeError, KeyError):
        hint = "`archerfish tts` writes such lines."
        raise InvalidInputError(f"{path} does not begin with global_tokens and semantic_tokens in JSON.", hint=hint) from None
