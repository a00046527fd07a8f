"""The architectures by the `model_type` of their config.json: a class, or "module:class" of one that is not imported yet."""

from __future__ import annotations

import importlib
from typing import Any

MODELS: dict[str, str | type[Any]] = {
    "llama": "archerfish.models.llama:LlamaModel",
    "mistral": "archerfish.models.mistral:MistralModel",
    "qwen2": "archerfish.models.qwen2:Qwen2Model",
    "qwen3": "archerfish.models.qwen3:Qwen3Model",
    "gemma2": "archerfish.models.gemma2:Gemma2Model",
    "gemma3_text": "archerfish.models.gemma3:Gemma3Model",
    "phi3": "archerfish.models.phi3:Phi3Model",
    "rwkv7": "archerfish.models.rwkv7:Rwkv7Model",
}
ENCODERS: dict[str, str | type[Any]] = {
    "bert": "archerfish.models.bert:BertEncoder",
    "distilbert": "archerfish.models.distilbert:DistilBertEncoder",
    "roberta": "archerfish.models.roberta:RobertaEncoder",
    "xlm-roberta": "archerfish.models.roberta:RobertaEncoder",
    "camembert": "archerfish.models.roberta:RobertaEncoder",
    "mpnet": "archerfish.models.mpnet:MPNetEncoder",
}


def class_of(found: str | type[Any]) -> type[Any]:
    """An entry of these tables as a class."""
    if isinstance(found, type):
        return found
    module, _, name = found.partition(":")
    loaded: type[Any] = getattr(importlib.import_module(module), name)
    return loaded
