"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that ends first in a stream of text; of several that end there, the longest.

    Text that may begin a stop string is held back. The cost is linear in the length of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = [Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string if it is complete now. Later text is not shown."""
        if self.matched is not None:
            return "", None
        if not self._matchers:
            return text, None
        best: tuple[int, int] | None = None  # where a stop ends in `text`, and minus its length
        for matcher in self._matchers:
            end = matcher.feed(text)
            if end is not None and (best is None or (end, -len(matcher.stop)) < best):
                best, self.matched = (end, -len(matcher.stop)), matcher.stop
        text, num_before = self._held + text, len(self._held)
        if best is not None:
            end, minus_length = best
            self._held = ""
            return text[: num_before + end + (0 if self._include else minus_length)], self.matched
        num_kept = max(matcher.num_matched for matcher in self._matchers)
        self._held = text[len(text) - num_kept :]
        return text[: len(text) - num_kept], None

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.num_matched = 0
        return held


class Matcher:
    """The longest beginning of one stop string with which the text so far ends (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = [0] * len(stop)  # after i + 1 matched characters: the length of the next shorter match
        for i in range(1, len(stop)):
            length = self._fallback[i - 1]
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            self._fallback[i] = length + (stop[i] == stop[length])

    def feed(self, text: str) -> int | None:
        """The position in `text` where the stop string first ends; None if it does not."""
        stop, fallback, matched = self.stop, self._fallback, self.num_matched
        place = 0
        while place < len(text):
            if not matched:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            while matched and text[place] != stop[matched]:
                matched = fallback[matched - 1]
            matched += text[place] == stop[matched]
            place += 1
            if matched == len(stop):
                self.num_matched = 0
                return place
        self.num_matched = matched
        return None
