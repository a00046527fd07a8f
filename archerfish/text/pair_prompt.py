"""How a decoder that ranks reads a query and a document: its chat template has a message for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.errors import UnsupportedModelError
from archerfish.text.chat_template import ChatTemplate
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.text.tokenizer import TokenizedText


class PairPrompt:
    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        """config: the model's, with an instruction (score_prompt) and keywords of the template (score_options)."""
        tokenizer = find_text_tokenizer(directory)
        if tokenizer is None:
            raise UnsupportedModelError(f"{directory} has no tokenizer.")
        self.tokenizer, self.template = tokenizer, ChatTemplate.find(directory, tokenizer=tokenizer)
        instruction = config.get("score_prompt")
        self.system = [{"role": "system", "content": instruction}] if instruction else []
        self.options = {"add_generation_prompt": False, **(config.get("score_options") or {})}

    def tokenize(self, pairs: Iterable[tuple[str, str]], max_length: int) -> list[TokenizedText]:
        found = []
        for query, document in pairs:
            ids = self._encode(query, document)
            is_cut, end = len(ids) > max_length, self._end
            if is_cut:  # what the template puts behind the texts, and the score is read from, stays
                ids = ids[: max_length - len(end)] + end
            found.append(TokenizedText(np.array(ids, np.int64), is_cut=is_cut))
        return found

    def _encode(self, query: str, document: str) -> list[int]:
        messages = [*self.system, {"role": "query", "content": query}, {"role": "document", "content": document}]
        return self.template.encode(self.tokenizer, messages, **self.options)

    @cached_property
    def _end(self) -> list[int]:
        """The tokens behind any texts."""
        one, other = (self._encode(text, text)[::-1] for text in ("x", ""))
        num = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if num is None:
            hint = 'It must have messages of the roles "query" and "document".'
            raise UnsupportedModelError("The chat template of this reranker leaves its texts out.", hint=hint)
        return one[:num][::-1]
