"""JSON-Schema-Test-Suite: an output of a schema is always valid. What is refused, and what is never written, is listed.

`JSON-Schema-Test-Suite.zip` has the tests of draft 2020-12 (https://github.com/json-schema-org/JSON-Schema-Test-Suite,
MIT), as the source distribution of jsonschema 4.26.0 has them.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

from engine.errors import RequestError
from engine.grammar.schema import bounded
from engine.grammar.source import form_of, new_rules

SUITE: Final = Path(__file__).with_name("JSON-Schema-Test-Suite.zip")
#: Schemas that are refused, by the file of the suite. Elsewhere none is.
REFUSED: Final[dict[str, int]] = {
    "additionalProperties": 2,
    "allOf": 2,
    "anyOf": 1,
    "contains": 7,
    "defs": 1,
    "dependentRequired": 4,
    "dependentSchemas": 4,
    "dynamicRef": 20,
    "if-then-else": 6,
    "maxContains": 3,
    "minContains": 6,
    "multipleOf": 1,
    "not": 8,
    "oneOf": 9,
    "patternProperties": 3,
    "propertyNames": 3,
    "ref": 5,
    "refRemote": 15,
    "unevaluatedItems": 18,
    "unevaluatedProperties": 16,
    "uniqueItems": 3,
}
#: Valid texts that no output is: objects are closed, and formats are followed.
NEVER: Final[dict[str, int]] = {
    "additionalProperties": 1,
    "allOf": 2,
    "anyOf": 1,
    "const": 5,
    "enum": 4,
    "format": 10,
    "properties": 1,
    "ref": 2,
    "type": 1,
    "unevaluatedItems": 1,
    "unevaluatedProperties": 4,
    "vocabulary": 1,
}


def suite() -> dict[str, list[dict[str, Any]]]:
    with zipfile.ZipFile(SUITE) as files:
        paths = [Path(name) for name in files.namelist() if name.endswith(".json")]
        return {path.stem: json.loads(files.read(str(path))) for path in paths}


def test_an_output_is_valid_and_what_is_refused_or_never_written_is_known() -> None:
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    refused, never, wrong = Counter[str](), Counter[str](), []
    for name, cases in suite().items():
        for case in cases:
            if not isinstance(case["schema"], dict):
                continue
            schema = {key: value for key, value in case["schema"].items() if key != "$schema"}
            try:
                form = form_of("json_schema", json.dumps(bounded(schema).schema))
                new_rules(form, tokenizer)
            except RequestError:
                refused[name] += 1
                continue
            for test in case["tests"]:
                text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False).encode()
                rules = new_rules(form, tokenizer)
                written = rules.validate_tokens(list(text)) == len(text)
                if written:
                    rules.consume_tokens(list(text))
                    written = rules.is_accepting()
                never[name] += bool(test["valid"] and not written)
                if written and not test["valid"]:
                    wrong.append((name, case["description"], test["description"]))
    assert wrong == []
    assert dict(refused) == REFUSED
    assert dict(+never) == NEVER
