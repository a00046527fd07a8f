"""The [[models]] tables of the TOML file: more models to serve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archerfish.config import CONFIG_ENV, LOADS, EmbedConfig, EngineConfig, parse_toml
from archerfish.errors import InvalidOptionError, refuse_unknown

MODEL_KINDS = ("generation", "embedding", "cross-encoder")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One more model to serve: a table `[[models]]` of the TOML file. Its options override those of [engine] or
    [embed]."""

    model: str
    kind: str = "generation"
    loads: str = ""  # empty: as [serve] loads says
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Any, where: str) -> ModelConfig:
        """A table of the TOML file, whose keys are model, kind, loads and the options of EngineConfig or
        EmbedConfig."""
        if not isinstance(values, dict) or not isinstance(values.get("model"), str):
            raise InvalidOptionError(f'Every [[models]] table of {where} needs the name of a model: model = "...".')
        options = dict(values)
        given = {name: options.pop(name) for name in ("model", "kind", "loads") if name in options}
        for name, choices in (("kind", MODEL_KINDS), ("loads", LOADS)):
            if given.get(name, choices[0]) not in choices:
                hint = f"It takes one of: {', '.join(choices)}."
                raise InvalidOptionError(f"[[models]] {name} cannot be {given[name]!r}.", hint=hint)
        owner = EngineConfig if given.get("kind", "generation") == "generation" else EmbedConfig
        refuse_unknown(options, ["kind", "loads", *owner.names()], f"key in [[models]] of {where}")
        return cls(**given, options=options)


def read_models(config_file: str | Path = "") -> list[ModelConfig]:
    """The [[models]] tables of the TOML file, if there is one."""
    path = config_file or os.environ.get(CONFIG_ENV, "")
    found = parse_toml(path).get("models", []) if path else []
    if not isinstance(found, list):
        raise InvalidOptionError(f"In {path}, 'models' must be a list of tables: [[models]].")
    return [ModelConfig.read(values, str(path)) for values in found]
