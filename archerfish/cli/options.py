"""Flags for the options of `config`, and a parser that suggests the nearest flag for a misspelt one."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from archerfish.config import Options, env_name, resolve
from archerfish.errors import InvalidOptionError, UnknownOptionError, did_you_mean

T = TypeVar("T", bound=Options)
COMMON_FLAGS = ("--config", "--json", "--quiet", "--debug", "--help", "--version")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises errors of archerfish instead of ending the process."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        raise InvalidOptionError(f"{message[:1].upper()}{message[1:]}.", hint=f"`{self.prog} --help` lists the options.")

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


def flag_name(parser: Parser, cls: type[Options], name: str) -> str:
    """`--name`, or `--section-name` where the command already has a `--name`."""
    short = "--" + name.replace("_", "-")
    return short if short not in parser.flags() else f"--{cls.section}-{name.replace('_', '-')}"


def add_options(parser: Parser, *sections: type[Options], repeatable: Sequence[str] = ()) -> None:
    """Add a flag for every option of some sections. A flag that is not given is not in the namespace.

    repeatable: options, by their `dest`, whose flags may be repeated; their values are lists.
    """
    for cls in sections:
        group = parser.add_argument_group(f"options of [{cls.section}]")
        for spec in dataclasses.fields(cls):
            keywords: dict[str, Any] = {"dest": dest(cls, spec.name), "default": argparse.SUPPRESS, "help": describe(cls, spec)}
            flag = flag_name(parser, cls, spec.name)
            if isinstance(spec.default, bool):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
            elif keywords["dest"] in repeatable:
                group.add_argument(flag, metavar=value_name(spec), action="append", **keywords)
            else:
                group.add_argument(flag, metavar=value_name(spec), **keywords)


def dest(cls: type[Options], name: str) -> str:
    return f"{cls.section}.{name}"


def value_name(spec: dataclasses.Field[Any]) -> str:
    choices: tuple[str, ...] | None = spec.metadata["choices"]
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X"}.get(type(spec.default), "TEXT")


def describe(cls: type[Options], spec: dataclasses.Field[Any]) -> str:
    default = {True: "on", False: "off"}[spec.default] if isinstance(spec.default, bool) else spec.default
    shown = f" (default: {default})" if default != "" else ""
    return f"{spec.metadata['description']}{shown} [{env_name(cls, spec.name)}]".replace("%", "%%")


def section(cls: type[T], arguments: argparse.Namespace) -> T:
    """The options of one section: flags, then environment, then file, then defaults."""
    prefix = f"{cls.section}."
    given = {key.removeprefix(prefix): value for key, value in vars(arguments).items() if key.startswith(prefix)}
    return resolve(cls, given, config_file=arguments.config)
