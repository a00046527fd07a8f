"""Several streams in one event loop, without a server."""

import asyncio

from archerfish import AsyncLLMEngine, SamplingParams


async def tell(llm: AsyncLLMEngine, name: str) -> str:
    text = ""
    async for delta in llm.stream(f"{name} was a little", SamplingParams(max_tokens=20, temperature=0.7, seed=3)):
        text += delta.text  # shown as it comes in a real program
    return f"{name} was a little{text}"


async def main() -> None:
    llm = AsyncLLMEngine("story-rwkv7")
    try:
        for story in await asyncio.gather(*(tell(llm, name) for name in ("Tim", "Sue", "Max"))):
            print(story)
    finally:
        await llm.close()


asyncio.run(main())
