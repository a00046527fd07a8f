"""The text of one sequence while it grows: tokens in, text that can be shown out."""

from __future__ import annotations

from collections.abc import Sequence

from archerfish.sequence import FinishReason, Request
from archerfish.text.detokenizer import Detokenizer
from archerfish.text.stops import StopStrings
from archerfish.text.tokenizer import Tokenizer


class OutputText:
    """Joins a Detokenizer and StopStrings for one sequence of a request."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._min_tokens = params.min_tokens if params.stop else 0
        self._hidden_ends = frozenset() if params.include_stop_str_in_output else request.stop_token_ids
        self.num_tokens = 0  # taken in; after a stop string, up to and with the token that completed it

    def feed(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> tuple[str, str | None]:
        """Text that the tokens add, and the stop string that has been found. The token that ended a sequence is not shown."""
        if finish_reason is None and not self._has_stops:
            self.num_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids), None
        shown: list[str] = []
        num_last = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            if finish_reason == "stop" and place == num_last and token_id in self._hidden_ends:
                continue
            shown.append(self._pass(self._detokenizer.feed((token_id,))))
        if finish_reason is not None and self._stops.matched is None:
            shown.append(self._pass(self._detokenizer.finish()))
            shown.append(self._stops.finish())
        return "".join(shown), self._stops.matched

    def _pass(self, text: str) -> str:
        """Before min_tokens a stop string is text like any other, also in its first half."""
        return text if self.num_tokens < self._min_tokens else self._stops.feed(text)[0]
