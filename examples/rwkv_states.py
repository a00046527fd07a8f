"""RWKV-7 keeps a state of fixed size instead of keys and values. Prompts that begin alike go on from a kept state."""

from archerfish import LLMEngine, SamplingParams

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside with her big red ball. " * 7
params = SamplingParams(max_tokens=12, temperature=0)

with LLMEngine("story-rwkv7") as llm:
    for end in ("One day, she saw a dog.", "One day, it was raining."):
        output = llm.generate([STORY + end], params)[0]
        known = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens"
        print(f"{known} were known: {output.metrics.ttft_ms:.0f} ms to the first token")
        print(output.text)
