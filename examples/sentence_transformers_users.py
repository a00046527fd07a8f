"""For programs written for sentence-transformers: one import is another, the rest stays."""

from archerfish import SentenceTransformer  # was: from sentence_transformers import SentenceTransformer
from archerfish.util import semantic_search

DOCUMENTS = ["A kitten is a young cat.", "Bread is baked.", "Trout live in rivers."]

model = SentenceTransformer("all-minilm-l6-v2")
documents = model.encode(DOCUMENTS, normalize_embeddings=True)
queries = model.encode(["What is a baby cat called?"], normalize_embeddings=True)
for hit in semantic_search(queries, documents, top_k=2)[0]:
    print(f"{hit['score']:.2f} {DOCUMENTS[hit['corpus_id']]}")
