"""Settings of late-interaction models (ColBERT), as sentence-transformers, PyLate and Stanford's code save them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archerfish.errors import CorruptFileError

PUNCTUATION = list(string.punctuation)
LENGTHS = ("query_length", "document_length", "query_expansion")
MARKERS = {"query": "query_prefix", "document": "document_prefix"}  # tokens in front of texts
ATTENDS = ("attend_to_expansion_tokens", "attend_to_mask_tokens")  # of PyLate, and of Stanford's code
LEGACY = (*LENGTHS, *ATTENDS, "do_query_expansion", "skiplist_words", *MARKERS.values())
USUAL_LENGTH = 32  # of a query with its expansion tokens
LEAST_LENGTH = 3  # a token between those that begin and end a text


def as_pylate(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The artifact.metadata of Stanford's code, in the words of PyLate."""
    return {
        "query_prefix": f"{metadata.get('query_token_id') or '[unused0]'} ",
        "document_prefix": f"{metadata.get('doc_token_id') or '[unused1]'} ",
        "query_length": metadata.get("query_maxlen"),
        "document_length": metadata.get("doc_maxlen"),
        "attend_to_mask_tokens": metadata.get("attend_to_mask_tokens"),
        "skiplist_words": PUNCTUATION if metadata.get("mask_punctuation", True) else [],
    }


def read_late_interaction(
    root: Path, stated: Mapping[str, Any], settings: Mapping[str, Any], mask: Mapping[str, Any] | None
) -> dict[str, Any]:
    """How queries and documents are read.

    stated: the configuration of the whole model, in which PyLate says everything. settings: the transformer's, and
    mask: the MultiVectorMask's, in which sentence-transformers does. mask is None where there is no such module.
    """
    check_texts(root, stated, mask or {})
    prefixes = {task: stated[name] or "" for task, name in MARKERS.items() if name in stated}
    prompts = {name: text for name, text in (stated.get("prompts") or {}).items() if text is not None}
    prompts |= {task: prefix + prompts.get(task, "").removeprefix(prefix) for task, prefix in prefixes.items()}
    found: dict[str, Any] = {**lengths(root, stated, settings), "prompts": prompts, "markers": list(prefixes.values())}
    if mask is not None:
        return found | {name: mask.get(name) for name in ("skiplist_words", "skiplist_tasks")}
    if stated.get("model_type") == "MultiVectorEncoder":
        return found
    usual = PUNCTUATION if prefixes or stated.get("model_type") == "ColBERT" else []
    words = stated.get("skiplist_words")
    return found | {"normalize": True, "skiplist_words": usual if words is None else words}


def check_texts(root: Path, stated: Mapping[str, Any], mask: Mapping[str, Any]) -> None:
    wrong = [name for name in MARKERS.values() if not isinstance(stated.get(name), str | None)]
    for settings in (stated, mask):
        words = settings.get("skiplist_words") or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            wrong.append("skiplist_words")
    if wrong:
        raise CorruptFileError(f"{root}: {' and '.join(wrong)} must be text.")


def lengths(root: Path, stated: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """At how many tokens queries and documents are cut, and the expansion of queries."""
    found = {name: stated[name] for name in LENGTHS if stated.get(name) is not None}
    is_legacy = any(name in stated for name in LEGACY)
    if "query_expansion" not in stated and is_legacy and stated.get("do_query_expansion") is not False:
        attends = [bool(stated[name]) for name in ATTENDS if name in stated]
        length = found.pop("query_length", USUAL_LENGTH)
        found["query_expansion"] = {"strategy": "fixed", "attend": attends[:1] == [True], "length": length}
    found |= {name: settings[name] for name in LENGTHS if name in settings}
    expansion = found.get("query_expansion")
    numbers = {name: found[name] for name in LENGTHS[:2] if found.get(name) is not None}
    if expansion is not None:
        if not isinstance(expansion, dict) or expansion.get("strategy") not in ("fixed", "min"):
            raise CorruptFileError(f"{root}: query_expansion has no strategy 'fixed' or 'min': {expansion!r}.")
        if not isinstance(expansion.get("token"), str | None):
            raise CorruptFileError(f"{root}: the token of query_expansion is {expansion['token']!r}.")
        numbers["the length of query_expansion"] = expansion.get("length")
    for name, number in numbers.items():
        if type(number) is not int or number < LEAST_LENGTH:
            raise CorruptFileError(f"{root}: {name} is {number!r}.")
    return found
