"""Flags for SamplingParams, and the engine, of `generate` and `chat`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import InvalidOptionError
from archerfish.params import SamplingParams

if TYPE_CHECKING:
    from archerfish.engine.llm_engine import LLMEngine

PREFIX = "sampling."
# Help texts; a test compares the names with the fields of SamplingParams.
DESCRIPTIONS = {
    "n": "number of answers to each prompt",
    "max_tokens": "most tokens of an answer; none: as many as model and memory allow",
    "min_tokens": "fewest tokens of an answer; end tokens and stop texts before them are ignored",
    "logit_bias": "add BIAS to the logit of the token ID; may be given several times",
    "repetition_penalty": "above 1: tokens of prompt and output become less likely",
    "presence_penalty": "subtracted once from the logits of tokens in the output",
    "frequency_penalty": "subtracted once for each time that a token is in the output",
    "temperature": "0: the most likely token; higher: more varied",
    "top_k": "draw from this many of the likeliest tokens; 0: from all",
    "top_p": "draw from the likeliest tokens that make up this share",
    "min_p": "leave out tokens less likely than this share of the likeliest",
    "seed": "makes the draws repeatable",
    "stop": "end the answer before this text; may be given several times",
    "stop_token_ids": "end the answer at this token; may be given several times",
    "include_stop_str_in_output": "show the text or token that ended the answer",
    "ignore_eos": "go on after the model's end token",
    "skip_special_tokens": "leave special tokens out of the text",
    "logprobs": "log-probabilities of the tokens and of this many of the likeliest ones at each place",
    "prompt_logprobs": "the same for the prompt",
    "grammar": "form of the answer: json, json_schema=SCHEMA, regex=PATTERN, lark=GRAMMAR or choice=[TEXT, ...]",
}
NO_FLAGS = ("stages",)  # fields for programs only
LISTS = {"stop": ("TEXT", str), "stop_token_ids": ("ID", int), "logit_bias": ("ID=BIAS", str)}


def add_sampling_flags(parser: Parser, **defaults: Any) -> None:
    """Add a flag for every field of SamplingParams but NO_FLAGS. A flag that is not given is not in the namespace."""
    group = parser.add_argument_group("sampling")
    for spec in dataclasses.fields(SamplingParams):
        if spec.name in NO_FLAGS:
            continue
        default = defaults.get(spec.name, spec.default)
        shown = f" (default: {default})" if type(default) in (int, float) else ""
        keywords: dict[str, Any] = {
            "dest": PREFIX + spec.name, "default": argparse.SUPPRESS, "help": DESCRIPTIONS[spec.name] + shown,
        }
        flag = "--" + spec.name.replace("_", "-")
        if isinstance(spec.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
        elif spec.name in LISTS:
            metavar, kind = LISTS[spec.name]
            group.add_argument(flag, action="append", metavar=metavar, type=kind, **keywords)
        elif spec.name == "grammar":
            group.add_argument(flag, metavar="KIND[=VALUE]", type=parse_grammar, **keywords)
        else:
            is_float = isinstance(spec.default, float)
            number: Callable[[str], Any] = float if is_float else count_or_none if spec.name == "max_tokens" else int
            group.add_argument(flag, metavar="X" if is_float else "N", type=number, **keywords)


def read_sampling_flags(arguments: Namespace, **defaults: Any) -> SamplingParams:
    """The SamplingParams of a command line."""
    given = {key.removeprefix(PREFIX): value for key, value in vars(arguments).items() if key.startswith(PREFIX)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(parse_bias(text) for text in given["logit_bias"])
    return SamplingParams(**{**defaults, **given})


def count_or_none(text: str) -> int | None:
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number or none, not {text!r}") from None


def parse_grammar(text: str) -> dict[str, Any]:
    """KIND or KIND=VALUE; the value of a choice is a JSON list."""
    kind, _, value = text.partition("=")
    try:
        return {"kind": kind, "value": json.loads(value) if kind == "choice" else value or None}
    except ValueError:
        raise argparse.ArgumentTypeError(f'choice takes a JSON list, such as choice=["yes", "no"], not {value!r}') from None


def parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidOptionError(f"--logit-bias takes ID=BIAS, such as 42=-1.5, not {text!r}.") from None


def open_engine(config: EngineConfig, hub: HubConfig, out: Output) -> LLMEngine:
    from archerfish.engine.llm_engine import LLMEngine

    with out.progress(f"Loading {config.model}") as progress:
        return LLMEngine(config, hub=hub, progress=progress)
