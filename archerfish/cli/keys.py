"""`archerfish keys`: make an API key for a tenant."""

from __future__ import annotations

from argparse import Namespace

from archerfish.cli.options import Parser
from archerfish.cli.output import Output

LIMITS = {
    "requests_per_minute": (float, "most requests in a minute (default: no limit)"),
    "tokens_per_minute": (float, "most tokens, of prompts and answers, in a minute (default: no limit)"),
    "weight": (float, "share of the batch, relative to other tenants (default: 1)"),
    "max_priority": (int, "highest priority of its requests (default: 0)"),
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="file with the hashes of keys, for [serve] api_keys_file")
    parser.add_argument("name", metavar="TENANT", help="name of the tenant, who may have several keys")
    for name, (kind, description) in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=description)
    parser.add_argument("--operator", action="store_true", help="may read the statistics of all tenants and change options")


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
        out.note("The key is shown only this once: the file keeps its hash.")
    return 0
