"""Describes a model by its files, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archerfish.config import EmbedConfig, EngineConfig, HubConfig
from archerfish.engine.arrow_engine import locate
from archerfish.engine.llm_loading import ModelFacts, read_facts
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.models.adapter import encoder_class
from archerfish.models.config import Config
from archerfish.serve.host_config import ModelSpec
from archerfish.store.metadata import ARROW_NAME, read_metadata
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.text.tokenizer import read_settings, stated_max_length
from archerfish.types import no_progress


@dataclass(frozen=True)
class Description:
    """card: what front ends get to know of a model; num_bytes: about how much memory it takes when it is loaded."""

    card: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0


def describe(spec: ModelSpec, hub: HubConfig) -> Description:
    """Read the files of a model, which are fetched and converted first if necessary. No weights are loaded."""
    if spec.kind == "generation":
        engine = EngineConfig(**spec.options)
        facts = read_facts(engine, hub, no_progress)
        card: dict[str, Any] = {"max_length": facts.max_len, "vocab_size": facts.vocab_size, "directory": str(facts.directory)}
        card |= {"is_tts": is_tts(facts), "device": facts.device, "dtype": facts.dtype}
        card["max_prompt_bytes"] = engine.max_prompt_bytes
        return Description(card, num_bytes_of_writer(facts))
    config = EmbedConfig(**spec.options)
    directory = locate(config, hub, no_progress)
    metadata = read_metadata(directory)
    values = Config(metadata.config)
    architecture = encoder_class(values)
    most = architecture.max_positions(values)
    stated = (metadata.embedding or {}).get("max_seq_length")
    stated = stated or stated_max_length(read_settings(directory / "tokenizer" / "tokenizer_config.json"))
    card = {"max_length": config.max_length or min(most, stated or most), "directory": str(directory)}
    if spec.kind == "embedding":
        card["dimension"] = architecture.block_shape(values).width
    return Description(card, num_bytes_of_encoder(directory))


def is_tts(facts: ModelFacts) -> bool:
    """Whether a model generates speech: an RWKV-7 whose vocabulary has TTS tokens, without a tokenizer of its own."""
    return facts.has_states and facts.vocab_size >= VOCAB_SIZE and find_text_tokenizer(facts.directory) is None


def num_bytes_of_writer(facts: ModelFacts) -> int:
    """Weights and KV."""
    return facts.weight_bytes + facts.memory.num_bytes


def num_bytes_of_encoder(directory: Path) -> int:
    arrow = directory / ARROW_NAME
    return arrow.stat().st_size if arrow.is_file() else 0
