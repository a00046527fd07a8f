"""A draft model at its own pace, for `archerfish bench cpu --only drafts`.

No small model with the vocabulary of another can be had without a network. So both models have random weights, the
model always writes the same token, and a share of the draft model's proposals is replaced by that token. What is
measured is the time of both models at a stated share of right tokens; it says nothing of how often a real draft model
is right.

Like `engines.py`, this file runs in the process of one engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.bench.engines import Archerfish, main

if TYPE_CHECKING:
    from archerfish.engine.drafting import ComputedDraft, ModelDrafter
    from archerfish.sequence import Sequence

SHAPES = {
    "model": (32, 960, 15, 5),
    "draft": (10, 384, 6, 3),
}  # layers, width, heads, heads of keys: 362M and 35M weights
WRITTEN, WRONG = 5, 6  # tokens


def write_shapes(folder: Path) -> dict[str, str]:
    """Options for both models."""
    for name, (num_layers, width, num_heads, num_kv_heads) in SHAPES.items():
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "vocab_size": 49_152,
            "intermediate_size": width * 8 // 3,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "eos_token_id": 0,
        }
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    paths = {"model": str(folder / "model"), "draft_model": str(folder / "draft")}
    return {**paths, "speculation": "draft", "load_format": "dummy"}


class PacedModel:
    """A draft model that takes its own time, and whose tokens are right as often as `share` says."""

    def __init__(self, model: ModelDrafter, share: float) -> None:
        self.takes = model.takes
        self.expect_seconds = model.expect_seconds
        self.close = model.close
        self._begin = model.begin
        self._share = share
        self._draw = random.Random(1)

    def begin(self, sequences: SequenceOf[Sequence], count: int) -> PacedDraft:
        return PacedDraft(self._begin(sequences, count), self._share, self._draw)


class PacedDraft:
    """The DraftJob of a PacedModel."""

    def __init__(self, job: ComputedDraft, share: float, draw: random.Random) -> None:
        self._job = job
        self._share = share
        self._draw = draw
        self.done = job.done

    def tokens(self, seq: Sequence) -> list[int]:
        found = [WRITTEN if self._draw.random() < self._share else WRONG for _ in self._job.tokens(seq)]
        if found:
            self._job.computed[seq][:] = found[:-1]
        return found


class ArcherfishPaced(Archerfish):
    def __init__(self, options: dict[str, Any], share: float) -> None:
        super().__init__(options)
        self.share = share

    def load(self) -> None:
        super().load()
        speculation: Any = self.engine.scheduler.speculation
        speculation.model = PacedModel(speculation.model, self.share)

    def decode(self, num_output: int, *, speculate: bool) -> dict[str, float]:
        """How one sequence went, after its first token."""
        params = self.params(num_output, speculate=speculate, logit_bias={WRITTEN: 100.0})
        metrics = self.engine.generate([[7, 8, 9]], params)[0].metrics
        rate = (metrics.num_output_tokens - 1) / (metrics.decode_ms / 1000)
        return {"rate": rate, "proposed": metrics.num_draft_tokens, "accepted": metrics.num_accepted_tokens}


if __name__ == "__main__":
    main(globals())
