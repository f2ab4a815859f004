"""LiteLLM's embedding and rerank against the gateway that the first argument names, by each of its providers that
speaks to a server of one's own. A script for `.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# Else it looks for a table of prices on the web while it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

litellm.suppress_debug_info = True

TEXTS = ["A penstock feeds a turbine.", "rain"]
DOCUMENTS = ["A penstock feeds a turbine.", "rain", "The queue is long."]


def main(url: str) -> None:
    base = f"{url}/v1"
    options: dict[str, Any] = {"input": TEXTS, "api_base": base, "api_key": "none"}
    ranking: dict[str, Any] = {"query": "What feeds a turbine?", "documents": DOCUMENTS, "api_key": "none"}
    vectors = {
        provider: [row["embedding"] for row in litellm.embedding(model=f"{provider}/embedder", **options).data]
        for provider in ("openai", "infinity", "hosted_vllm")
    }
    cut = litellm.embedding(
        model="openai/embedder", dimensions=16, allowed_openai_params=["dimensions"], **options
    ).data
    bases = {"infinity": base, "cohere": f"{url}/v2/rerank", "hosted_vllm": base, "jina_ai": f"{base}/rerank"}
    ranked = {}
    for provider, address in bases.items():
        # It takes infinity's documents for texts, and Cohere's are objects.
        answer = litellm.rerank(
            model=f"{provider}/reranker", api_base=address, top_n=2, return_documents=provider != "infinity", **ranking
        )
        ranked[provider] = [[each["index"], each["relevance_score"]] for each in answer.results]
    try:
        litellm.embedding(model="openai/reranker", **options)
        refused = ""
    except litellm.BadRequestError as error:
        refused = str(error)
    told = {"vectors": vectors, "cut": [row["embedding"] for row in cut], "ranked": ranked, "refused": refused}
    print(json.dumps(told))


main(sys.argv[1])
