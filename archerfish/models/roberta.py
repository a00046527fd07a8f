"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions count from the padding id on."""

from __future__ import annotations

import numpy as np

from archerfish.kernels.ops import T
from archerfish.layers.encoder import ClassifierHead
from archerfish.layers.weights import Weights
from archerfish.models.bert import BertEncoder
from archerfish.models.config import Config
from archerfish.models.encoder import TokenBatch


class RobertaEncoder(BertEncoder[T]):
    prefix = "roberta"

    def position_ids(self, batch: TokenBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return batch.segments.positions + (self.config.integer("pad_token_id", 1) + 1)

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return config.integer("max_position_embeddings") - config.integer("pad_token_id", 1) - 1

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        return ClassifierHead(
            weights, "classifier.dense", "classifier.out_proj", config.integer("hidden_size"), config.num_labels, "tanh"
        )
