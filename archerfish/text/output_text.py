"""The text of one sequence while it grows: tokens in, text that can be shown out."""

from __future__ import annotations

from collections.abc import Container, Sequence

from archerfish.params import SamplingParams
from archerfish.text.detokenizer import Detokenizer
from archerfish.text.stops import StopStrings
from archerfish.text.tokenizer import Tokenizer


class OutputText:
    """Detokenises one sequence, finds its stop strings, and hides the token that ended it.

    Without a tokenizer, and for tokens of stages, which stand for no text, it only counts tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and not params.stages:
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._min_tokens = params.min_tokens if params.stop else 0
        self._shows_end = params.include_stop_str_in_output
        self.num_tokens = 0  # of the output: up to and with the token that completed a stop string
        self.num_shown = 0  # the same without the token that ended the sequence, unless that is shown

    def feed(
        self, token_ids: Sequence[int], finish_reason: str | None = None, end_token_ids: Container[object] = ()
    ) -> tuple[str, str | None]:
        """The text that tokens add, and the stop string that is complete now.

        end_token_ids: the last token is hidden if it is one of these and the sequence ends with "stop".
        """
        detokenizer = self._detokenizer
        if finish_reason is None and not self._has_stops:
            self.num_tokens += len(token_ids)
            self.num_shown = self.num_tokens
            return "" if detokenizer is None else detokenizer.feed(token_ids), None
        is_end = finish_reason == "stop" and bool(token_ids) and token_ids[-1] in end_token_ids
        num_visible = len(token_ids) - (is_end and not self._shows_end)
        if detokenizer is None:
            self.num_shown = self.num_tokens + num_visible
            self.num_tokens += len(token_ids)
            return "", None
        texts: list[str] = []
        for token_id in token_ids[:num_visible]:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            texts.append(self._search(detokenizer.feed((token_id,))))
        self.num_shown = self.num_tokens
        if self._stops.matched is None:
            self.num_tokens += len(token_ids) - num_visible
            if finish_reason is not None:
                texts.append(self._search(detokenizer.finish()))
                texts.append(self._stops.finish())
        return "".join(texts), self._stops.matched

    def _search(self, text: str) -> str:
        """The part of a text that can be shown. Before min_tokens a stop string is ordinary text."""
        return text if self.num_tokens < self._min_tokens else self._stops.feed(text)[0]
