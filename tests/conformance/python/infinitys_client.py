"""infinity's client against the gateway that the first argument names. A script for `.venv/clients`: what came is
printed as JSON."""

from __future__ import annotations

import json
import sys

from infinity_client import Client
from infinity_client.api.default import embeddings, rerank
from infinity_client.models import OpenAIEmbeddingInputText, RerankInput

TEXTS = ["A penstock feeds a turbine.", "rain"]
DOCUMENTS = [*TEXTS, "The queue is long."]


def main(url: str) -> None:
    with Client(base_url=f"{url}/v1", raise_on_unexpected_status=True, timeout=60) as client:
        vectors = embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_=TEXTS, model="embedder"))
        body = RerankInput(query="What feeds a turbine?", documents=DOCUMENTS, model="reranker", top_n=2)
        ranked = rerank.sync(client=client, body=body)
    told = {
        "vectors": [each.embedding for each in vectors.data],
        "tokens": vectors.usage.prompt_tokens,
        "ranked": [[each.index, each.relevance_score] for each in ranked.results],
    }
    print(json.dumps(told))


main(sys.argv[1])
