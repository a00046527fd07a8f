"""SamplingParams: how the tokens of a request are chosen."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from archerfish.errors import InvalidInputError, did_you_mean, refuse_unknown
from archerfish.remarks import remark

logger = logging.getLogger("archerfish")
MAX_STOP_STRINGS, MAX_STOP_BYTES = 64, 1024
MAX_LOGPROBS, MAX_N = 64, 128
MAX_BIASES = 1024
MAX_STAGES = 16
MAX_GRAMMAR_BYTES = 1 << 17
MAX_GRAMMAR_LINES = 2000
MAX_CHOICES = 1024  # compiling takes up to their square
PLAIN = (int, float, bool, str, type(None))  # types of values that cannot change
GRAMMAR_KINDS = ("json", "json_schema", "regex", "lark", "choice")
MIN_SEED, MAX_SEED = -(2**63), 2**64  # as signed numbers of 64 bits, and as ones without a sign
NO_SEED = -1  # other engines write it for None
# The members of vLLM's structured_outputs and the kinds of grammars that they are.
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "json"}
STRUCTURED_UNUSED = (
    "backend",
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)
OUTPUT_KINDS = ("cumulative", "delta", "final_only")
# Parameters of other engines, with the hint of their error; and hints of errors about bounds.
NOT_SUPPORTED = {
    "best_of": "Use n, and choose among the outputs by their cumulative_logprob.",
    "use_beam_search": "Call LLM.beam_search.",
    "length_penalty": "It belongs to BeamSearchParams, for LLM.beam_search.",
    "early_stopping": "LLM.beam_search always runs to max_tokens or until all beams have ended.",
    "truncate_prompt_tokens": "Cut the prompt's token ids before the call.",
}
# Parameters of other engines that change nothing here, and why.
IGNORED = {
    "spaces_between_special_tokens": "special tokens are written without spaces between them",
    "skip_clone": "parameters are never copied",
    "flat_logprobs": "logprobs are lists of TokenLogprobs",
    "extra_args": "there are no plug-ins that read it",
    "skip_reading_prefix_cache": "cached prefixes give the same tokens",
}
ADVICE = {"max_tokens": "None stands for as many as model and memory allow."}
WHOLE = {"n": (1, MAX_N), "min_tokens": (0, None), "top_k": (0, None)}
OPTIONAL = {
    "max_tokens": (1, None),
    "seed": (MIN_SEED, MAX_SEED - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
FLOATS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
# Parameters for which a model's files may state defaults.
MODEL_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Parameters that stages have themselves, or that would depend on the stage of a token.
NOT_WITH_STAGES = (
    "min_tokens",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "stop",
    "logprobs",
    "grammar",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
)
# (output ids, logits) or (prompt ids, output ids, logits) -> logits; rows are float32 tensors of torch in the host's
# memory.
LogitsProcessor = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of an output whose tokens are drawn from a range of the vocabulary; probabilities are those within the
    range.

    A range of one token forces that token. Only the last stage may end before it has all its tokens.
    """

    first: int  # the first id of the range
    end: int  # the id after the last one
    num_tokens: int
    offset: int = 0  # added to a drawn id; the sum is the output and the next input of the model
    stop_id: int | None = None  # a drawn id that ends the output
    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            object.__setattr__(self, spec.name, plain_number(getattr(self, spec.name)))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        check_whole("first", self.first, 0)
        check_whole("end", self.end, self.first + 1)
        check_whole("num_tokens", self.num_tokens, 1)
        check_whole("offset", self.offset, -self.first)
        if self.stop_id is not None:
            check_whole("stop_id", self.stop_id, self.first, self.end - 1)
        check_whole("top_k", self.top_k, 0)
        for name in ("temperature", "top_p"):
            check_number(name, getattr(self, name))


class TakesForeignNames(type):
    """Takes parameters of other engines that change nothing out of a call, with a remark."""

    def __call__(cls, **values: Any) -> Any:
        for name in [name for name in values if name in IGNORED]:
            if values.pop(name):
                remark(name, f"The sampling parameter {name} has no effect: {IGNORED[name]}.")
        for name in [name for name in values if name in NOT_SUPPORTED and values[name] in (None, False)]:
            del values[name]
        return super().__call__(**values)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(metaclass=TakesForeignNames):
    """Sampling options of a request, checked when made. Penalties and filters apply in the order of the fields
    below."""

    n: int = 1  # sequences for each prompt, drawn independently
    max_tokens: int | None = 16  # None: as many as the model's length and the memory allow
    min_tokens: int = 0  # end tokens and stops have no effect before this many tokens
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    repetition_penalty: float = 1.0  # divides positive logits of tokens of prompt and output, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    temperature: float = 1.0  # 0: the most likely token
    min_p: float = 0.0  # leaves out tokens less likely than this share of the likeliest
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    seed: int | None = None  # None or -1: drawn when the request arrives
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # log-probabilities of each output token and of this many of the likeliest
    prompt_logprobs: int | None = None
    grammar: Mapping[str, Any] | None = None  # {"kind": one of GRAMMAR_KINDS, "value": ...}, which the output follows
    structured_outputs: Any = (
        None  # vLLM's name and form of a grammar, which takes its place: {"json": schema}, {"regex": ...}
    )
    guided_decoding: Any = None  # an older name of structured_outputs
    bad_words: Sequence[
        str
    ] = ()  # the last token of each of these words, with and without a space before it, is ruled out
    allowed_token_ids: Sequence[int] | None = None  # no other tokens are drawn, end tokens included
    logits_processors: Sequence[LogitsProcessor] = ()  # run on the host: each token waits for them
    detokenize: bool = True  # false: the result has token ids and no text
    output_kind: Any = "cumulative"  # what AsyncLLMEngine.generate yields: one of OUTPUT_KINDS, or their place
    speculate: bool = (
        True  # propose tokens where the engine does (`speculation`); the tokens that come out are the same
    )
    stages: Sequence[
        Stage
    ] = ()  # parts of the output, in order; they set max_tokens and stop_token_ids, and ignore_eos

    def __new__(cls, **values: Any) -> Self:
        refuse_unknown(values, cls.__dataclass_fields__, "sampling parameter", NOT_SUPPORTED)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        stop = (
            (self.stop,) if isinstance(self.stop, str) else items_of("stop", self.stop, "a string or a list of strings")
        )
        object.__setattr__(self, "stop", stop)
        token_ids = items_of("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(map(plain_number, token_ids)))
        for name in (*WHOLE, *OPTIONAL, *FLOATS):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        self._check_numbers()
        object.__setattr__(self, "seed", None if self.seed in (None, NO_SEED) else self.seed % MAX_SEED)
        self._check_stops(stop)
        self._check_bias()
        self._read_limits()
        if self.grammar is not None:
            object.__setattr__(self, "grammar", read_grammar(self.grammar))
            self._check_grammar_conflicts()
        object.__setattr__(self, "stages", tuple(map(read_stage, items_of("stages", self.stages, "a list of stages"))))
        if self.stages:
            self._settle_stages()

    def _check_numbers(self) -> None:
        for name, (low, high) in {**WHOLE, **OPTIONAL}.items():
            value = getattr(self, name)
            if value is not None or name in WHOLE:
                check_whole(name, value, low, high)
        for name in FLOATS:
            check_number(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).")
        if self.n > 1 and self.temperature == 0:
            raise InvalidInputError(
                "n is above 1 at temperature 0: all sequences would be equal.", hint="Raise temperature."
            )

    def _check_stops(self, stop: tuple[str, ...]) -> None:
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidInputError(f"stop has {len(stop):,} strings; the limit is {MAX_STOP_STRINGS}.")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidInputError(f"stop must hold strings that are not empty, not {text!r}.")
            if len(text.encode(errors="replace")) > MAX_STOP_BYTES:
                raise InvalidInputError(f"A stop string has more than {MAX_STOP_BYTES} bytes.")
        if len(self.stop_token_ids) > MAX_STOP_STRINGS:
            raise InvalidInputError(
                f"stop_token_ids has {len(self.stop_token_ids):,} ids; the limit is {MAX_STOP_STRINGS}."
            )
        if not all(type(i) is int and i >= 0 for i in self.stop_token_ids):
            raise InvalidInputError("stop_token_ids must be whole numbers of at least 0.")

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidInputError(
                f"logit_bias must map token ids to numbers, not be a {type(self.logit_bias).__name__}."
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidInputError(f"logit_bias has {len(self.logit_bias):,} tokens; the limit is {MAX_BIASES:,}.")
        plain = {plain_number(token_id): plain_number(bias) for token_id, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", plain)
        for token_id, bias in plain.items():
            if type(token_id) is not int or token_id < 0:
                raise InvalidInputError(f"logit_bias must map token ids to numbers; {token_id!r} is no token id.")
            if not is_number(bias) or not -100 <= bias <= 100:
                raise InvalidInputError(
                    f"logit_bias of token {token_id} must be a number from -100 to 100, not {bias!r}."
                )

    def _read_limits(self) -> None:
        """The parameters that rule tokens out, and those that vLLM writes in another way."""
        for name in ("structured_outputs", "guided_decoding"):
            if getattr(self, name) is None:
                continue
            if self.grammar is not None:
                raise InvalidInputError(f"{name} and grammar exclude each other: an answer has one form.")
            object.__setattr__(self, "grammar", read_structured(name, getattr(self, name)))
            object.__setattr__(self, name, None)
        words = items_of("bad_words", self.bad_words, "a list of strings")
        if len(words) > MAX_BIASES or not all(isinstance(word, str) and word.strip() for word in words):
            raise InvalidInputError(f"bad_words must hold up to {MAX_BIASES:,} words that are not empty.")
        object.__setattr__(self, "bad_words", words)
        if self.allowed_token_ids is not None:
            ids = items_of("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            ids = tuple(map(plain_number, ids))
            if not ids or not all(type(i) is int and i >= 0 for i in ids):
                raise InvalidInputError("allowed_token_ids must be a list of at least one token id.")
            object.__setattr__(self, "allowed_token_ids", ids)
        processors = items_of("logits_processors", self.logits_processors, "a list of functions")
        if not all(callable(processor) for processor in processors):
            raise InvalidInputError("logits_processors must hold functions of (token ids, logits) that return logits.")
        if processors:
            remark(
                "logits_processors",
                "logits_processors run on the host, row by row: they slow every token of a request.",
            )
        object.__setattr__(self, "logits_processors", processors)
        kind = getattr(self.output_kind, "name", self.output_kind)  # vLLM has an enumeration
        kind = OUTPUT_KINDS[kind] if type(kind) is int and 0 <= kind < len(OUTPUT_KINDS) else str(kind).lower()
        if kind not in OUTPUT_KINDS:
            raise InvalidInputError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, not {self.output_kind!r}.")
        object.__setattr__(self, "output_kind", kind)
        if not self.detokenize and self.stop:
            raise InvalidInputError(
                "stop needs text: it and detokenize=False exclude each other.", hint="Use stop_token_ids."
            )

    def _check_grammar_conflicts(self) -> None:
        """A grammar decides where a text ends, so parameters that also decide it are refused."""
        if self.ignore_eos:
            raise InvalidInputError(
                "ignore_eos and grammar exclude each other: a grammar ends the text when it is complete.",
                hint="Leave out one.",
            )
        if self.min_tokens:
            raise InvalidInputError(
                f"min_tokens ({self.min_tokens}) and grammar exclude each other: a grammar may be complete before.",
                hint="Leave out min_tokens, and state the least length in the grammar.",
            )

    def _settle_stages(self) -> None:
        """Set the parameters that follow from the stages."""
        if len(self.stages) > MAX_STAGES:
            raise InvalidInputError(f"There are {len(self.stages):,} stages; the limit is {MAX_STAGES}.")
        *early, last = self.stages
        if any(stage.stop_id is not None for stage in early):
            raise InvalidInputError(
                "Only the last stage may have a stop_id.", hint="Give the others a num_tokens alone."
            )
        stops: tuple[int, ...] = () if last.stop_id is None else (last.stop_id + last.offset,)
        if any(stage.first <= stop - stage.offset < stage.end for stage in early for stop in stops):
            raise InvalidInputError(f"A stage before the last can give token {stops[0]}, on which the last one ends.")
        for name in NOT_WITH_STAGES:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise InvalidInputError(
                    f"{name} and stages exclude each other.", hint="A stage has its own parameters."
                )
        if self.stop_token_ids not in ((), stops):
            raise InvalidInputError(
                "stop_token_ids and stages exclude each other.", hint="Give the last stage a stop_id."
            )
        object.__setattr__(self, "stop_token_ids", stops)
        object.__setattr__(self, "max_tokens", sum(stage.num_tokens for stage in self.stages))
        object.__setattr__(self, "ignore_eos", True)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams of these values. Equal values of an earlier call are not checked again."""
        if any(type(value) not in PLAIN and value != [] for value in values.values()):
            return cls(**values)
        return _known_params(
            tuple((name, type(value), None if value == [] else value) for name, value in values.items())
        )

    def replace(self, **changes: Any) -> SamplingParams:
        return dataclasses.replace(self, **changes)

    def lowered_to(self, max_tokens: int) -> SamplingParams:
        """With fewer output tokens. Of stages only the last is shortened, to one token at least."""
        if not self.stages:
            return self.replace(max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))
        *early, last = self.stages
        num_left = max(1, max_tokens - sum(stage.num_tokens for stage in early))
        return self.replace(stages=[*early, dataclasses.replace(last, num_tokens=num_left)])

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@lru_cache(maxsize=256)
def _known_params(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    """Types are part of the key: 1, 1.0 and True are equal but not all valid for every parameter."""
    return SamplingParams(**{name: [] if kind is list else value for name, kind, value in items})


def read_default_sampling(stated: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The defaults among the settings of a generation_config.json. Values that are not valid are ignored, with a
    warning."""
    found: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        if stated.get(name) is not None:
            try:
                SamplingParams(**{name: stated[name]})
            except InvalidInputError as error:
                logger.warning("The generation_config.json of %s: %s It is ignored.", model, error.message)
            else:
                found[name] = stated[name]
    return found


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a request over the defaults of its model. A default temperature of 0 counts for one sequence
    only."""
    if values.get("n", 1) != 1 and defaults.get("temperature") == 0:
        defaults = {name: value for name, value in defaults.items() if name != "temperature"}
    return {**defaults, **values}


def plain_number(value: Any) -> Any:
    """A number of NumPy or torch as one of Python; anything else unchanged."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:
        return value


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)  # an int may be too long to be made a float


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidInputError(f"{name} must be a whole number {bounds}, not {value!r}.", hint=ADVICE.get(name))


def check_number(name: str, value: Any) -> None:
    lowest, highest = FLOATS[name]
    if not is_number(value) or not lowest <= value <= highest:
        raise InvalidInputError(f"{name} must be a number from {lowest:g} to {highest:g}, not {value!r}.")
    if name == "top_p" and value == 0:
        raise InvalidInputError("top_p must be above 0.", hint="Use temperature=0 for the most likely token.")


def read_stage(value: Any) -> Stage:
    """A Stage from a Stage or from a mapping of its fields."""
    if isinstance(value, Stage):
        return value
    if not isinstance(value, Mapping):
        raise InvalidInputError(
            f"stages must hold stages, not {type(value).__name__}.", hint="Make them with Stage(...)."
        )
    try:
        return Stage(**value)
    except TypeError as error:
        raise InvalidInputError(f"A stage cannot be read: {error}.") from None


def items_of(name: str, values: Any, what: str) -> tuple[Any, ...]:
    """The items of a list as a tuple. None, JSON's null, is an empty list."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be {what}, not {type(values).__name__}.")
    return tuple(values)


def read_grammar(grammar: Any) -> dict[str, Any]:
    """A grammar as a dict of kind and value. Its shape is checked here; compiling it may still fail."""
    if not isinstance(grammar, Mapping):
        raise InvalidInputError(
            f"grammar must be a mapping, not {type(grammar).__name__}.",
            hint='Give {"kind": "json_schema", "value": {...}}.',
        )
    unknown = [name for name in grammar if name not in ("kind", "value")]
    if unknown:
        raise InvalidInputError(f"grammar has no {unknown[0]!r}, only kind and value.")
    kind, value = grammar.get("kind"), grammar.get("value")
    if kind not in GRAMMAR_KINDS:
        hint = f"Use one of {', '.join(GRAMMAR_KINDS)}."
        raise InvalidInputError(f"grammar has no kind {kind!r}.", hint=hint)
    if kind == "json":
        if value is not None:
            raise InvalidInputError("A grammar of kind json takes no value.", hint="Use json_schema for one.")
    elif kind == "json_schema":
        value = read_schema(value)
    elif kind == "choice":
        value = list(items_of("The value of a grammar of kind choice", value, "a list of strings"))
        if not 0 < len(value) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in value):
            raise InvalidInputError(f"A grammar of kind choice takes 1 to {MAX_CHOICES:,} strings that are not empty.")
    elif not isinstance(value, str) or not value:
        raise InvalidInputError(f"A grammar of kind {kind} takes a string that is not empty, not {value!r}.")
    check_grammar_size(kind, value)
    return {"kind": kind, "value": value}


def read_structured(name: str, value: Any) -> dict[str, Any]:
    """The grammar of vLLM's structured_outputs, a mapping or an object with its members."""
    members = dict(value) if isinstance(value, Mapping) else {**getattr(value, "__dict__", {})}
    given = {member: found for member, found in members.items() if found not in (None, False)}
    forms = [member for member in given if member in STRUCTURED]
    if "structural_tag" in given:
        raise InvalidInputError(f"{name}.structural_tag is not supported.", hint="Use a grammar of kind lark.")
    for member in given.keys() - {*STRUCTURED, *STRUCTURED_UNUSED}:
        raise InvalidInputError(f"{name} has no member {member!r}.", hint=did_you_mean(member, STRUCTURED))
    if len(forms) != 1:
        found = " and ".join(forms) or "none of them"
        raise InvalidInputError(f"{name} takes exactly one of {', '.join(STRUCTURED)}, not {found}.")
    for member in given.keys() - forms:
        remark(f"{name}.{member}", f"{name}.{member} has no effect.")
    form = given[forms[0]]
    form = form.model_json_schema() if hasattr(form, "model_json_schema") else form
    return {"kind": STRUCTURED[forms[0]], "value": None if forms[0] == "json_object" else form}


def read_schema(value: Any) -> dict[str, Any]:
    """A copy of a JSON schema, which may also be given as a string."""
    try:
        read = json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"The JSON schema of a grammar is not valid JSON: {error}.") from None
    if not isinstance(read, dict):
        raise InvalidInputError(f"The JSON schema of a grammar must be an object, not {type(value).__name__}.")
    return read


def check_grammar_size(kind: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidInputError(
            f"The grammar of kind {kind} has {num_bytes:,} bytes; the limit is {MAX_GRAMMAR_BYTES:,}."
        )
    num_lines = text.count("\n") + 1
    if kind == "lark" and num_lines > MAX_GRAMMAR_LINES:
        raise InvalidInputError(
            f"The grammar of kind lark has {num_lines:,} lines; the limit is {MAX_GRAMMAR_LINES:,}."
        )
