"""Strict JSON schemas of KEDA's resources (2.21). KEDA's own leave a trigger's metadata open: any string for any key.

Sources: the specifications of ScaledObject and TriggerAuthentication, and of both triggers, at keda.sh/docs.
"""

from __future__ import annotations

from typing import Any, Final


def _object(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT: Final = {"type": "string", "minLength": 1}
COUNT: Final = {"type": "integer", "minimum": 0}
#: Trigger metadata are strings: YAML's numbers and booleans would be refused by the API server.
NUMBER: Final = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
WHOLE: Final = {"type": "string", "pattern": r"^\d+$"}
BOOLEAN: Final = _one_of("true", "false")
URL: Final = {"type": "string", "pattern": r"^https?://[^/\s]+"}

PROMETHEUS: Final = _object(
    "serverAddress query threshold ignoreNullValues",
    serverAddress=URL,
    query=TEXT,
    threshold=NUMBER,
    activationThreshold=NUMBER,
    # Its default takes lost metrics for zero.
    ignoreNullValues={"const": "false"},
    namespace=TEXT,
    customHeaders=TEXT,
    queryParameters=TEXT,
    unsafeSsl=BOOLEAN,
    timeout=WHOLE,
    authModes=TEXT,
)
SQS: Final = _object(
    "awsRegion queueURL queueLength",
    queueURL={"type": "string", "pattern": r"^https://sqs\.[a-z0-9-]+\.amazonaws\.com/\d{12}/[\w.-]{1,80}$"},
    queueLength=WHOLE,
    activationQueueLength=WHOLE,
    awsRegion={"type": "string", "pattern": r"^[a-z]{2}(-[a-z]+)+-\d$"},
    awsEndpoint=URL,
    scaleOnInFlight=BOOLEAN,
    scaleOnDelayed=BOOLEAN,
)


def _trigger(kind: str, metadata: dict[str, Any]) -> dict[str, Any]:
    return _object(
        "type metadata",
        type={"const": kind},
        name={"type": "string", "pattern": r"^[a-z]\w*$"},
        metricType=_one_of("AverageValue", "Value"),
        useCachedMetrics={"type": "boolean"},
        authenticationRef=_object(
            "name", name=TEXT, kind=_one_of("TriggerAuthentication", "ClusterTriggerAuthentication")
        ),
        metadata=metadata,
    )


_POLICY: Final = _object(
    "type value periodSeconds",
    type=_one_of("Pods", "Percent"),
    value={"type": "integer", "minimum": 1},
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
_RULES: Final = _object(
    "policies",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=_one_of("Max", "Min", "Disabled"),
    policies={"type": "array", "items": _POLICY, "minItems": 1},
)
_META: Final = _object(
    "name namespace", name=TEXT, namespace=TEXT, labels={"type": "object"}, annotations={"type": "object"}
)

SCALED_OBJECT: Final = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=_META,
    spec=_object(
        "scaleTargetRef maxReplicaCount fallback triggers",
        scaleTargetRef=_object("name", name=TEXT, apiVersion=TEXT, kind=TEXT, envSourceContainerName=TEXT),
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        initialCooldownPeriod=COUNT,
        idleReplicaCount={"const": 0},
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        fallback=_object(
            "failureThreshold replicas behavior",
            failureThreshold={"type": "integer", "minimum": 1},
            replicas=COUNT,
            # The others take workers away, or start some, because numbers are missing.
            behavior=_one_of("currentReplicas", "currentReplicasIfHigher"),
        ),
        advanced=_object(
            "",
            restoreToOriginalReplicaCount={"type": "boolean"},
            horizontalPodAutoscalerConfig=_object(
                "", name=TEXT, behavior=_object("scaleUp scaleDown", scaleUp=_RULES, scaleDown=_RULES)
            ),
            scalingModifiers=_object(
                "formula target",
                formula=TEXT,
                target=NUMBER,
                activationTarget=NUMBER,
                metricType=_one_of("AverageValue", "Value"),
            ),
        ),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": {
                # By its type, so that an error names what is wrong in this trigger's metadata.
                "properties": {"type": _one_of("prometheus", "aws-sqs-queue")},
                "required": ["type"],
                "if": {"properties": {"type": {"const": "prometheus"}}},
                "then": _trigger("prometheus", PROMETHEUS),
                "else": _trigger("aws-sqs-queue", SQS),
            },
        },
    ),
)
TRIGGER_AUTHENTICATION: Final = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "TriggerAuthentication"},
    metadata=_META,
    spec=_object(
        "podIdentity",
        podIdentity=_object(
            "provider", provider=_one_of("aws"), roleArn=TEXT, identityOwner=_one_of("keda", "workload")
        ),
    ),
)
SCHEMAS: Final = {"ScaledObject": SCALED_OBJECT, "TriggerAuthentication": TRIGGER_AUTHENTICATION}
