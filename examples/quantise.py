"""A model with int8 matrices as a directory, and what it says beside the original."""

import tempfile
from pathlib import Path

from archerfish import LLM, ConversionConfig, ModelConverter, SamplingParams

with tempfile.TemporaryDirectory() as directory:
    target = Path(directory) / "story-int8"
    result = ModelConverter(ConversionConfig(weights="int8", report=False)).convert("story-rwkv7", target)
    print(f"{result.file_size_mb:.1f} MB, {1 / result.compression_ratio:.2f} of the source")
    for model in ("story-rwkv7", str(target)):
        with LLM(model) as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=24, temperature=0))[0].text)
