"""LangChain's OpenAIEmbeddings against the gateway that the first argument names. A script for `.venv/clients`: what
came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from langchain_openai import OpenAIEmbeddings

TEXTS = ["A penstock feeds a turbine.", "rain"]


async def main(url: str) -> None:
    client = OpenAIEmbeddings(
        model="embedder",
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,  # else it sends token ids of OpenAI's vocabulary
        chunk_size=1,
    )
    told = {
        "documents": client.embed_documents(TEXTS),
        "query": client.embed_query(TEXTS[0]),
        "awaited": await client.aembed_documents(TEXTS),
    }
    print(json.dumps(told))


asyncio.run(main(sys.argv[1]))
