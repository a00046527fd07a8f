"""The configuration of a service on a cluster: from the TOML file to what `serve deploy` takes, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archerfish.config import DeployConfig, EmbedConfig, EngineConfig, HubConfig, Options, ServeConfig
from archerfish.errors import InvalidOptionError, refuse_unknown
from archerfish.serve.model_tables import ModelConfig
from archerfish.serve.processes import ModelSpec
from archerfish.serve.run import models_of

ENGINES, FRONT_ENDS = "engines", "front-ends"  # the deployments; each is in an application of its own
SECTIONS = (ServeConfig, DeployConfig, EngineConfig, EmbedConfig, HubConfig)


@dataclass(frozen=True)
class Settings:
    """All options of a service."""

    deploy: DeployConfig
    serve: ServeConfig
    engine: EngineConfig
    embed: EmbedConfig
    hub: HubConfig
    models: list[ModelConfig]

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Settings:
        """From the args of an application: the tables of the TOML file."""
        refuse_unknown(args, [*(one.section for one in SECTIONS), "models"], "argument of archerfish.deploy.ray")
        found: dict[str, Any] = {one.section: one(**args.get(one.section, {})) for one in SECTIONS}
        return cls(**found, models=[ModelConfig.read(values, "args") for values in args.get("models", [])])

    def specs(self) -> tuple[ModelSpec, ...]:
        return models_of(self.serve, self.engine, self.embed, self.models)

    def args(self, *sections: type[Options]) -> dict[str, Any]:
        """The tables of the TOML file, without what has its default value."""
        found = {one.section: changed(getattr(self, one.section)) for one in sections}
        tables: dict[str, Any] = {name: values for name, values in found.items() if values}
        if EngineConfig in sections and self.models:
            tables["models"] = [changed(model) | dict(model.options) for model in self.models]
        return tables

    def front_args(self) -> dict[str, Any]:
        """Those of the front ends, which a change of anything else leaves alone."""
        own = DeployConfig(name=self.deploy.name, front_ends=self.deploy.front_ends)
        return dataclasses.replace(self, deploy=own).args(ServeConfig, DeployConfig)

    def check(self) -> None:
        """Refuse what cannot work on a cluster."""
        if not self.specs():
            raise InvalidOptionError(
                "No model is served.", hint="Name one in [engine] model, [embed] model or [[models]]."
            )
        num_ranks, gpus = max(spec.num_ranks for spec in self.specs()), self.deploy.gpus
        if 0 < gpus < num_ranks:
            message = f"[deploy] gpus is {gpus:g}, but a model is divided over {num_ranks} processes."
            raise InvalidOptionError(message, hint=f"Set gpus to {num_ranks}, or to 0 for CPU cores.")
        if not self.serve.port:
            raise InvalidOptionError(
                "[serve] port cannot be 0 on a cluster.", hint="Choose a port that is free on every node."
            )
        if self.serve.replicas > 1:
            hint = "Write [deploy] min_replicas and max_replicas."
            raise InvalidOptionError("[serve] replicas are those of one machine.", hint=hint)
        if self.serve.zmq_address:
            raise InvalidOptionError(
                "[serve] zmq_address is not for a cluster: engine processes have their own addresses."
            )


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default value; `options` of a ModelConfig are left out."""
    fields = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options) if spec.name != "options"}
    defaults = {spec.name: spec.default for spec in dataclasses.fields(options)}
    return {name: value for name, value in fields.items() if value != defaults[name]}


def app_names(service: str) -> tuple[str, str]:
    """The applications of a service: its engine hosts, and its front ends. A change of one leaves the other alone."""
    return f"{service}-{ENGINES}", f"{service}-{FRONT_ENDS}"


def serve_config(settings: Settings) -> dict[str, Any]:
    """What `serve deploy` takes. No HTTP proxy of Ray's is started: our front ends are the way in."""
    args = {"app": settings.args(*SECTIONS), "front_ends": settings.front_args()}
    applications = [
        {"name": name, "import_path": f"archerfish.deploy.ray:{builder}", "route_prefix": None, "args": args[builder]}
        for name, builder in zip(app_names(settings.deploy.name), args, strict=True)
    ]
    return {"proxy_location": "Disabled", "applications": applications}


def to_yaml(config: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(config, sort_keys=False)
    return (
        f"# serve deploy FILE, with RAY_AUTH_MODE=token on every node; made by `archerfish deploy ray --yaml`\n{text}"
    )
