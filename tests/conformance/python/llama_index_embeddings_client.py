"""LlamaIndex's OpenAILikeEmbedding against the gateway that the first argument names. A script for `.venv/clients`:
what came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = ["A penstock feeds a turbine.", "rain"]


async def main(url: str) -> None:
    options = {"model_name": "embedder", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    client = OpenAILikeEmbedding(embed_batch_size=1, **options)
    told = {
        "documents": client.get_text_embedding_batch(TEXTS),
        "query": client.get_query_embedding(TEXTS[0]),
        "awaited": await client.aget_text_embedding_batch(TEXTS),
        "cut": OpenAILikeEmbedding(dimensions=16, **options).get_text_embedding(TEXTS[0]),
    }
    print(json.dumps(told))


asyncio.run(main(sys.argv[1]))
