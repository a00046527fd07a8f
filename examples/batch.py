"""Many prompts at once without a server: they share steps, and results come in the order of the prompts."""

from archerfish import LLM, SamplingParams

PROMPTS = [f"{name} went to the river and saw" for name in ("Lily", "Tom", "Anna", "Ben")]

with LLM("story-rwkv7") as llm:
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, seed=1)):
        print(f"{output.prompt}{output.outputs[0].text!r}, first token after {output.metrics.ttft_ms:.0f} ms")
    choice = SamplingParams(max_tokens=4, temperature=0, structured_outputs={"choice": ["happy", "sad"]})
    print("At the end Lily was", llm.generate("At the end Lily was", choice)[0].text)
