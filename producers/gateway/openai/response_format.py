"""OpenAI's ways to ask for JSON: `response_format` of completions, `text.format` of responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from producers.contract.chat import read_string
from producers.errors import shown
from producers.gateway.http.errors import invalid_value, unknown_parameter
from producers.gateway.openai.parameters import TextRequest, flag, refusal

TEXT: Final = {"type": "text"}
#: Most characters of a name, as with OpenAI.
MAX_NAME: Final = 64
_NAME: Final = re.compile("[a-zA-Z0-9_-]+")
#: Members that describe a schema.
_SCHEMA_MEMBERS: Final = ("name", "description", "schema", "strict")
#: JSON schemas of the members that describe something.
DESCRIBED: Final[dict[str, Any]] = {
    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$", "maxLength": MAX_NAME},
    "description": {"type": "string"},
    "strict": {"type": "boolean"},
}
_SCHEMA: Final[dict[str, Any]] = DESCRIBED | {"schema": {"type": "object"}}
#: JSON schemas of `response_format` and `text.format`.
NESTED: Final = {
    "oneOf": [
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "required": ["name"], "properties": _SCHEMA},
            },
        },
    ]
}
FLAT: Final = {
    "oneOf": [
        NESTED["oneOf"][0],
        {
            "type": "object",
            "required": ["type", "name", "schema"],
            "properties": {"type": {"const": "json_schema"}, **_SCHEMA},
        },
    ]
}


def formed(text_request: TextRequest, parameter: str, value: Any) -> TextRequest:
    """The request with the schema that `value`, its parameter `parameter`, asks for. Raises Problem."""
    schema = schema_of(parameter, value)
    if schema is None:
        return text_request
    if "json_schema" in text_request.fields:
        raise invalid_value(parameter, f"{parameter} and json_schema mean the same; give one of them")
    return replace(
        text_request,
        fields=text_request.fields | {"json_schema": schema},
        names=text_request.names | {"json_schema": parameter},
    )


def schema_of(parameter: str, value: Any) -> dict[str, Any] | None:
    """The JSON schema that a format asks for; None for plain text. Raises Problem."""
    if not isinstance(value, dict):
        raise refusal(parameter, value, "an object with a type", code="invalid_type")
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refusal(f"{parameter}.type", kind, "text, json_object or json_schema")
    if kind != "json_schema":
        check_known(parameter, value, ("type",))
        return {"type": "object"} if kind == "json_object" else None
    if parameter == "response_format":
        check_known(parameter, value, ("type", "json_schema"))
        parameter, value = f"{parameter}.json_schema", value.get("json_schema")
        if not isinstance(value, dict):
            raise refusal(parameter, value, "an object with name and schema", code="invalid_type")
        check_known(parameter, value, _SCHEMA_MEMBERS)
    else:
        check_known(parameter, value, ("type", *_SCHEMA_MEMBERS))
    return _schema(parameter, value)


def _schema(parameter: str, description: Mapping[str, Any]) -> dict[str, Any]:
    described(parameter, description)
    schema = description.get("schema")
    if not isinstance(schema, dict):
        raise refusal(f"{parameter}.schema", schema, "a JSON schema, which is an object", code="invalid_type")
    return schema


def described(parameter: str, description: Mapping[str, Any], longest: int = MAX_NAME) -> tuple[str, bool]:
    """The name of what a caller describes, a schema or a function, and whether it is strict. `longest`: the most
    characters of a name. Raises Problem and InvalidTask, also for a wrong description."""
    name, strict = description.get("name"), description.get("strict")
    if not isinstance(name, str) or len(name) > longest or not _NAME.fullmatch(name):
        raise refusal(f"{parameter}.name", name, f"1 to {longest} of a-z, A-Z, 0-9, _ and -")
    if description.get("description") is not None:
        read_string(description["description"], f"{parameter}.description")
    return name, strict is not None and flag({f"{parameter}.strict": strict}, f"{parameter}.strict")


def check_known(parameter: str, value: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in value:
        if name not in names:
            raise unknown_parameter(f"{parameter}.{shown(name)[1:-1]}", f"there is {', '.join(names)}")
