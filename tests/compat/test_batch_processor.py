from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from archerfish.compat.batch_processor import BatchProcessor
from archerfish.errors import InputTooLargeError, InvalidInputError, InvalidOptionError, ModelError
from tests.engine.fakes import FakeEngine


def test_a_full_buffer_is_encoded_in_order() -> None:
    engine = FakeEngine()
    processor = BatchProcessor(engine, max_batch_size=3)
    assert processor.add("a") is processor.add("b") is None and len(processor) == 2
    vectors = processor.add("c")
    assert vectors is not None and engine.batches == [["a", "b", "c"]]
    np.testing.assert_array_equal(np.stack(vectors), FakeEngine().encode_batch(["a", "b", "c"]))
    processor.add("d")
    assert len(processor.flush()) == 1 and processor.flush() == [] and len(engine.batches) == 2
    processor.add("e")
    assert processor.clear() == ["e"] and len(processor) == 0


def test_a_failing_engine_loses_no_text() -> None:
    engine = FakeEngine(poison="bad")
    processor = BatchProcessor(engine, max_batch_size=2)
    processor.add("good")
    with pytest.raises(RuntimeError, match="poisoned"):
        processor.add("bad")
    with pytest.raises(RuntimeError, match="poisoned"):
        processor.add("third")
    assert len(processor) == 3
    engine.poison = ""
    engine.batches.clear()
    assert len(processor.flush()) == 3
    assert [len(batch) for batch in engine.batches] == [2, 1]


def test_a_bad_text_is_refused_when_it_is_added() -> None:
    processor = BatchProcessor(FakeEngine(max_text_bytes=3))
    with pytest.raises(InvalidInputError, match="not int"):
        processor.add(3)  # type: ignore[arg-type]
    with pytest.raises(InputTooLargeError):
        processor.add("abcd")
    assert len(processor) == 0
    with pytest.raises(InvalidOptionError):
        BatchProcessor(FakeEngine(), max_batch_size=0)


def test_a_wrong_number_of_vectors_is_an_error() -> None:
    class Short:
        def encode_batch(self, texts: Sequence[str]) -> npt.NDArray[Any]:
            return np.zeros((1, 2))

    processor = BatchProcessor(Short(), max_batch_size=2)
    processor.add("a")
    with pytest.raises(ModelError, match="1 vectors for 2 texts"):
        processor.add("b")
    assert len(processor) == 2


def test_threads_lose_nothing() -> None:
    processor = BatchProcessor(FakeEngine(), max_batch_size=7)
    with ThreadPoolExecutor(4) as threads:
        counts = list(threads.map(lambda number: len(processor.add(str(number)) or []), range(400)))
    assert sum(counts) + len(processor.flush()) == 400
