"""`archerfish deploy ray` gives the service to a Ray cluster."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack

from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output
from archerfish.config import DeployConfig, EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.serve.model_tables import read_models


def add_deploy_arguments(parser: Parser) -> None:
    text = "TOML file, as `archerfish serve --config` takes it, with [deploy]"
    parser.add_argument("file", nargs="?", metavar="CONFIG", help=text)
    parser.add_argument("--yaml", action="store_true", help="only print what `serve deploy` takes")
    parser.add_argument("--stop", action="store_true", help="remove the service; its running requests are finished")
    add_options(parser, DeployConfig)


def run_deploy(arguments: Namespace, out: Output) -> int:
    from archerfish.deploy import cluster
    from archerfish.deploy.secrets import cluster_token
    from archerfish.deploy.settings import Settings, serve_config, to_yaml

    arguments.config = arguments.file or arguments.config
    settings = Settings(
        deploy=section(DeployConfig, arguments),
        serve=section(ServeConfig, arguments),
        engine=section(EngineConfig, arguments),
        embed=section(EmbedConfig, arguments),
        hub=section(HubConfig, arguments),
        models=read_models(arguments.config),
    )
    if arguments.yaml:
        settings.check()
        out.line(to_yaml(serve_config(settings)).rstrip())
        return 0
    with ExitStack() as stack:
        progress = stack.enter_context(out.progress("Deploying"))

        def announce(line: str) -> None:
            stack.close()  # removes the progress bar
            out.line(line)
            sys.stdout.flush()

        shown = [""]

        def show(text: str) -> None:
            progress(0, 0, text)
            if text != shown[0] and not out.shows_progress:
                out.note(text)
            shown[0] = text

        if arguments.stop:
            cluster.Cluster(settings.deploy.address, cluster_token()).stop(settings, show)
            announce(f"{settings.deploy.name} has been stopped.")
        else:
            cluster.deploy(settings, show, announce)
    return 0
