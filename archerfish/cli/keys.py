"""`archerfish keys`: a new API key for a tenant."""

from __future__ import annotations

from argparse import Namespace

from archerfish.cli.options import Parser
from archerfish.cli.output import Output

LIMITS = {
    "requests_per_minute": (float, "requests that it may send in a minute (default: no limit)"),
    "tokens_per_minute": (float, "tokens, of prompts and answers, that it may use in a minute (default: no limit)"),
    "weight": (float, "its share of the batch, against the weights of others (default: 1)"),
    "max_priority": (int, "the highest priority that its requests may have (default: 0)"),
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="where the hashes of keys are kept: [serve] api_keys_file")
    parser.add_argument("name", metavar="TENANT", help="whose key it is; one tenant may have several")
    for name, (kind, description) in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=description)
    parser.add_argument("--operator", action="store_true", help="may read figures of all and change options")


def run(arguments: Namespace, out: Output) -> int:
    from archerfish.serve.tenants import add_key

    limits = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    if arguments.operator:
        limits["is_operator"] = True
    key = add_key(arguments.file, arguments.name, **limits)
    if out.as_json:
        out.result({"tenant": arguments.name, "key": key, "file": arguments.file})
    else:
        out.line(key)
        out.note("This is the only time that the key is shown: the file has its hash.")
    return 0
