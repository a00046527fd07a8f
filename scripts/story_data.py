"""Stories as rows of tokens: a byte-level vocabulary made for them, and requests that a story answers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.draw_stories import END_LINE

REQUEST, ANSWER = "<|user|>", "<|assistant|>"
SPECIAL = (END_LINE, REQUEST, ANSWER)  # ids 0, 1, 2; the first stands in front of every text and behind it
END = 0
CHAT_TEMPLATE = (
    "{{ '<|end|>' }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|assistant|>' + message.content + '<|end|>' }}{% elif message.role == 'user' %}{{ '<|user|>' + message.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FORMS = ("Tell me a story about {}.", "Write a story with {}.", "{}")
NOUN = re.compile(
    r"\b(?:an?|the)(?: [a-z]+)? ([a-z]{3,})(?=[.,!?]| (?:and|was|were|had|said|that|who|in|on|to|with|named)\b)"
)
COMMON, RARE = 0.25, 0.0005  # a request names nouns that this part of all stories has at most and at least
SEEN_STORIES = 20_000  # to make the vocabulary of, and to count words in


def train_tokenizer(stories: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte pairs: every text has tokens, and every row of tokens is bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories[:SEEN_STORIES], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_LINE} $A", pair=f"{END_LINE} $A $B", special_tokens=[(END_LINE, END)]
    )
    return tokenizer


def telling_nouns(stories: Sequence[str]) -> frozenset[str]:
    """Nouns (as far as their places tell) of which a story may be asked: neither in many stories nor in hardly any."""
    counts: Counter[str] = Counter()
    for story in stories[:SEEN_STORIES]:
        counts.update(set(NOUN.findall(story)))
    total = min(len(stories), SEEN_STORIES)
    return frozenset(word for word, count in counts.items() if RARE * total <= count <= COMMON * total)


def with_request(story: str, nouns: frozenset[str], draw: random.Random) -> str:
    """The story as an answer to a request that names up to three of its nouns."""
    found = sorted(set(NOUN.findall(story)) & nouns)
    if not found:
        return story
    article = draw.choice(("", "a "))
    chosen = [article + noun for noun in draw.sample(found, min(len(found), draw.randint(1, 3)))]
    named = " and ".join(filter(None, (", ".join(chosen[:-1]), chosen[-1])))
    return f"{REQUEST}{draw.choice(FORMS).format(named)}{ANSWER}{story}"


def encode_stories(tokenizer: Tokenizer, stories: Sequence[str], seed: int) -> list[npt.NDArray[np.uint16]]:
    """Tokens of each story, every second one with a request; END in front of each."""
    draw, nouns = random.Random(seed), telling_nouns(stories)
    texts = [with_request(story, nouns, draw) if number % 2 else story for number, story in enumerate(stories)]
    encoded: list[npt.NDArray[np.uint16]] = []
    for begin in range(0, len(texts), 16384):
        encoded += [np.array(each.ids, np.uint16) for each in tokenizer.encode_batch_fast(texts[begin : begin + 16384])]
    return encoded


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
