"""Flags for the options of `config` and for SamplingParams, and a parser that suggests the nearest flag for a misspelt
one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from archerfish.config import Options, resolve
from archerfish.errors import InvalidOptionError, UnknownOptionError, did_you_mean
from archerfish.params import MODEL_DEFAULTS, SamplingParams, with_defaults

T = TypeVar("T", bound=Options)
COMMON_FLAGS = ("--config", "--json", "--quiet", "--debug", "--help", "--version")
# Help texts; a test compares the names with the fields of SamplingParams.
SAMPLING = {
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
    "speculate": "propose tokens where `speculation` is on",
    "grammar": "form of the answer: json, json_schema=SCHEMA, regex=PATTERN, lark=GRAMMAR or choice=[TEXT, ...]",
}
NO_FLAGS = (  # fields for programs only
    "structured_outputs",
    "guided_decoding",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "detokenize",
    "output_kind",
    "stages",
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises errors of archerfish instead of ending the process."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        raise InvalidOptionError(
            f"{message[:1].upper()}{message[1:]}.", hint=f"`{self.prog} --help` lists the options."
        )

    def flags(self) -> list[str]:
        """All long flags of this parser."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse flags and texts in any order. An unknown flag is the first error to be reported."""
        given = list(arguments)
        end = given.index("--") if "--" in given else len(given)
        known = self.flags()
        for argument in given[:end]:
            flag = argument.split("=", 1)[0]
            if flag.startswith("--") and len(flag) > 2 and flag not in known:
                raise UnknownOptionError(f"`{self.prog}` has no option {flag}.", hint=suggest_flag(flag, known))
        # parse_known_intermixed_args ignores "--".
        found, extra = self.parse_known_args(given) if "--" in given else self.parse_known_intermixed_args(given)
        if extra:
            hint = f"`{self.prog} --help` shows its arguments."
            raise InvalidOptionError(f"`{self.prog}` does not take {extra[0]!r}.", hint=hint)
        return found


def suggest_flag(flag: str, known: Sequence[str]) -> str:
    """The nearest flags: those that begin with the given one, else similar ones."""
    longer = [name for name in known if len(flag) > 4 and name.startswith(flag)]
    return f"Did you mean {' or '.join(longer)}?" if longer else did_you_mean(flag, known)


def add_common(parser: Parser) -> None:
    """Add the flags of every command."""
    group = parser.add_argument_group("common options")
    group.add_argument("--config", metavar="FILE", default="", help="TOML file with options (also ARCHERFISH_CONFIG)")
    group.add_argument("--json", action="store_true", help="print JSON for machines")
    group.add_argument("--quiet", action="store_true", help="no progress bars and no remarks")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    group.add_argument("--version", action=VersionAction, nargs=0, help="show the version and what was built")


class VersionAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, *_: object) -> None:
        show_version(as_json=found.json)
        parser.exit()


def show_version(*, as_json: bool = False) -> int:
    """Write the version and build; the first two words are the program and its version."""
    from archerfish.kernels.build import build_info

    found = build_info()
    lines = [
        f"archerfish {found['version']}" + (f" (commit {found['commit']})" if found["commit"] else ""),
        f"native kernels: {found['instructions'] or 'not compiled'}",
        f"torch: {found['torch'] or 'not installed'}",
        f"Python {found['python']}, {found['system']}",
    ]
    sys.stdout.write((json.dumps(found) if as_json else "\n".join(lines)) + "\n")
    return 0


def add_options(
    parser: Parser, *sections: type[Options], first: Sequence[str] = (), repeatable: Sequence[str] = ()
) -> None:
    """Add a flag for every option of some sections: `--name`, or `--section-name` where the command already has a
    `--name`.

    A flag that is not given is not in the namespace. first: options, by their `dest`, that the help shows before the
    others.
    repeatable: those whose values are lists.
    """
    most_used = parser.add_argument_group("most used") if first else None
    for cls in sections:
        rest = parser.add_argument_group(f"{str(cls.__doc__).splitlines()[0].rstrip('.')} [{cls.section}]")
        for spec in dataclasses.fields(cls):
            key, choices = dest(cls, spec.name), spec.metadata["choices"]
            flag = as_flag(spec.name)
            if flag in parser.flags():
                flag = as_flag(f"{cls.section}_{spec.name}")
            default = {True: "on", False: "off"}[spec.default] if isinstance(spec.default, bool) else spec.default
            shown = f" (default: {default})" if default != "" else ""
            text = f"{spec.metadata['description']}{shown}".replace("%", "%%")
            metavar = {int: "N", float: "X"}.get(type(spec.default), "TEXT")
            metavar = "{" + ",".join(choices) + "}" if choices else metavar
            action = "append" if key in repeatable else "store"
            group = most_used if most_used is not None and key in first else rest
            add_flag(group, key, spec.default, flag=flag, help=text, metavar=metavar, action=action)


def add_flag(group: Any, key: str, default: object, *, flag: str = "", **keywords: Any) -> None:
    """Add the flag of a field with the given default; key: where its value is in the namespace, if the flag is
    given."""
    if isinstance(default, bool):
        keywords = {"action": argparse.BooleanOptionalAction, "help": keywords["help"]}
    group.add_argument(flag or as_flag(key.partition(".")[2]), dest=key, default=argparse.SUPPRESS, **keywords)


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def dest(cls: type[Options], name: str) -> str:
    return f"{cls.section}.{name}"


def values_of(prefix: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given of one group, by the names of their fields."""
    return {key.removeprefix(prefix): value for key, value in vars(arguments).items() if key.startswith(prefix)}


def section(cls: type[T], arguments: argparse.Namespace) -> T:
    """The options of one section: flags, then environment, then file, then defaults."""
    return resolve(cls, values_of(f"{cls.section}.", arguments), config_file=arguments.config)


def add_sampling_flags(parser: Parser, **defaults: Any) -> None:
    """Add a flag for every field of SamplingParams but NO_FLAGS. A flag that is not given is not in the namespace."""
    group = parser.add_argument_group("sampling")
    for spec in dataclasses.fields(SamplingParams):
        if spec.name in NO_FLAGS:
            continue
        default = defaults.get(spec.name, spec.default)
        of_model = "what the model's files state, else " if spec.name in MODEL_DEFAULTS else ""
        shown = f" (default: {of_model}{default})" if type(default) in (int, float) else ""
        metavar, kind = VALUES.get(spec.name, ("X", float) if isinstance(spec.default, float) else ("N", int))
        action = "append" if spec.name in ("stop", "stop_token_ids", "logit_bias") else "store"
        text = SAMPLING[spec.name] + shown
        add_flag(group, f"sampling.{spec.name}", spec.default, help=text, metavar=metavar, type=kind, action=action)


def read_sampling_flags(arguments: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """The SamplingParams of a command line."""
    given = values_of("sampling.", arguments)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**with_defaults(given, defaults))


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
        raise argparse.ArgumentTypeError(
            f'choice takes a JSON list, such as choice=["yes", "no"], not {value!r}'
        ) from None


def parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"ID=BIAS, such as 42=-1.5, not {text!r}") from None


# What a flag takes, where that is not plainly a number: its name in the help, and the function that reads it.
VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "stop": ("TEXT", str),
    "stop_token_ids": ("ID", int),
    "logit_bias": ("ID=BIAS", parse_bias),
    "max_tokens": ("N", count_or_none),
    "grammar": ("KIND[=VALUE]", parse_grammar),
}
