"""Semantic search: vectors of documents once, then the nearest ones to each question. Needs `archerfish serve`."""

import sys

import numpy as np
from openai import OpenAI

DOCUMENTS = [
    "The archerfish shoots insects with a jet of water.",
    "Sourdough bread rises for many hours.",
    "A kitten is a young cat.",
    "Interest rates were raised again.",
    "Trout live in cold, clear rivers.",
]

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")


def embed(texts: list[str]) -> np.ndarray:
    found = client.embeddings.create(model="all-minilm-l6-v2", input=texts)
    return np.array([one.embedding for one in found.data])  # of length 1, so products are cosines


index = embed(DOCUMENTS)
for question in ("What is a baby cat called?", "Which fish hunts with water?"):
    scores = index @ embed([question])[0]
    best = int(scores.argmax())
    print(f"{question} -> {DOCUMENTS[best]} ({scores[best]:.2f})")
