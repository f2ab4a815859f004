"""Strict JSON schemas of KEDA's resources (2.21). KEDA's own leave a trigger's metadata open: any string for any key.

Sources: the specifications of ScaledObject and TriggerAuthentication, and of both triggers, at keda.sh/docs.
"""

from __future__ import annotations

from typing import Any, Final


def object_of(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT: Final = {"type": "string", "minLength": 1}
COUNT: Final = {"type": "integer", "minimum": 0}
#: Trigger metadata are strings: YAML's numbers and booleans would be refused by the API server.
NUMBER: Final = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
WHOLE: Final = {"type": "string", "pattern": r"^\d+$"}
BOOLEAN: Final = one_of("true", "false")
URL: Final = {"type": "string", "pattern": r"^https?://[^/\s]+"}

PROMETHEUS: Final = object_of(
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
SQS: Final = object_of(
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
    return object_of(
        "type metadata",
        type={"const": kind},
        name={"type": "string", "pattern": r"^[a-z]\w*$"},
        metricType=one_of("AverageValue", "Value"),
        useCachedMetrics={"type": "boolean"},
        authenticationRef=object_of(
            "name", name=TEXT, kind=one_of("TriggerAuthentication", "ClusterTriggerAuthentication")
        ),
        metadata=metadata,
    )


_POLICY: Final = object_of(
    "type value periodSeconds",
    type=one_of("Pods", "Percent"),
    value={"type": "integer", "minimum": 1},
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
_RULES: Final = object_of(
    "policies",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=one_of("Max", "Min", "Disabled"),
    policies={"type": "array", "items": _POLICY, "minItems": 1},
)
_META: Final = object_of(
    "name namespace", name=TEXT, namespace=TEXT, labels={"type": "object"}, annotations={"type": "object"}
)

SCALED_OBJECT: Final = object_of(
    "apiVersion kind metadata spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=_META,
    spec=object_of(
        "scaleTargetRef maxReplicaCount fallback triggers",
        scaleTargetRef=object_of("name", name=TEXT, apiVersion=TEXT, kind=TEXT, envSourceContainerName=TEXT),
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        initialCooldownPeriod=COUNT,
        idleReplicaCount={"const": 0},
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        fallback=object_of(
            "failureThreshold replicas behavior",
            failureThreshold={"type": "integer", "minimum": 1},
            replicas=COUNT,
            # The others take workers away, or start some, because numbers are missing.
            behavior=one_of("currentReplicas", "currentReplicasIfHigher"),
        ),
        advanced=object_of(
            "",
            restoreToOriginalReplicaCount={"type": "boolean"},
            horizontalPodAutoscalerConfig=object_of(
                "", name=TEXT, behavior=object_of("scaleUp scaleDown", scaleUp=_RULES, scaleDown=_RULES)
            ),
            scalingModifiers=object_of(
                "formula target",
                formula=TEXT,
                target=NUMBER,
                activationTarget=NUMBER,
                metricType=one_of("AverageValue", "Value"),
            ),
        ),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": {
                # By its type, so that an error names what is wrong in this trigger's metadata.
                "properties": {"type": one_of("prometheus", "aws-sqs-queue")},
                "required": ["type"],
                "if": {"properties": {"type": {"const": "prometheus"}}},
                "then": _trigger("prometheus", PROMETHEUS),
                "else": _trigger("aws-sqs-queue", SQS),
            },
        },
    ),
)
TRIGGER_AUTHENTICATION: Final = object_of(
    "apiVersion kind metadata spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "TriggerAuthentication"},
    metadata=_META,
    spec=object_of(
        "podIdentity",
        podIdentity=object_of(
            "provider", provider=one_of("aws"), roleArn=TEXT, identityOwner=one_of("keda", "workload")
        ),
    ),
)
SCHEMAS: Final = {"ScaledObject": SCALED_OBJECT, "TriggerAuthentication": TRIGGER_AUTHENTICATION}
