"""Cohere's clients of both versions against the gateway that the first argument names. A script for `.venv/clients`:
what came is printed as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import cohere
from cohere.errors import BadRequestError

DOCUMENTS = ["A penstock feeds a turbine.", "rain", "The queue is long."]
ASKED: dict[str, Any] = {"model": "reranker", "query": "What feeds a turbine?"}


def scores(results: list[Any]) -> list[Any]:
    return [[result.index, result.relevance_score] for result in results]


def main(url: str) -> None:
    client, earlier = cohere.ClientV2(api_key="none", base_url=url), cohere.Client(api_key="none", base_url=url)
    ranked = client.rerank(documents=DOCUMENTS, **ASKED)
    best = client.rerank(documents=DOCUMENTS, top_n=1, **ASKED)
    objects = [{"text": document} for document in DOCUMENTS]
    returned = earlier.rerank(documents=objects, return_documents=True, **ASKED)
    try:
        client.rerank(documents=DOCUMENTS, **ASKED | {"model": "embedder"})
        refused = ""
    except BadRequestError as error:
        refused = error.body["error"]["message"]
    told = {
        "id": ranked.id,
        "ranked": scores(ranked.results),
        "best": scores(best.results),
        "returned": scores(returned.results),
        "documents": [result.document.text for result in returned.results],
        "refused": refused,
    }
    print(json.dumps(told))


main(sys.argv[1])
