"""Strict JSON schemas of resources of Prometheus' operator, of the Gateway API and of LeaderWorkerSets, as far as
`infra/` uses them.

Sources: the API references of monitoring.coreos.com/v1 at prometheus-operator.dev, of gateway.networking.k8s.io/v1
(standard channel, 1.2) at gateway-api.sigs.k8s.io, and of leaderworkerset.x-k8s.io/v1 at lws.sigs.k8s.io.
"""

from __future__ import annotations

from typing import Any, Final

from tests.infra.deploy.keda import COUNT, TEXT, object_of, one_of
from tests.infra.deploy.keda import SCHEMAS as KEDA

DURATION: Final = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
HOST: Final = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
PORT: Final = {"type": "integer", "minimum": 1, "maximum": 65535}
_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
_META: Final = object_of("name namespace", name=TEXT, namespace=TEXT, labels=_TEXTS, annotations=_TEXTS)


def _resource(api: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return object_of(
        "apiVersion kind metadata spec", apiVersion={"const": api}, kind={"const": kind}, metadata=_META, spec=spec
    )


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


_ENDPOINT: Final = object_of(
    "port path interval authorization",
    port=TEXT,
    path={"type": "string", "pattern": "^/"},
    interval=DURATION,
    authorization=object_of("credentials", type=TEXT, credentials=object_of("name key", name=TEXT, key=TEXT)),
)
_SELECTOR: Final = object_of("matchLabels", matchLabels=_TEXTS)
_MONITORING: Final = "monitoring.coreos.com/v1"
SERVICE_MONITOR: Final = _resource(
    _MONITORING,
    "ServiceMonitor",
    object_of("jobLabel selector endpoints", jobLabel=TEXT, selector=_SELECTOR, endpoints=_list(_ENDPOINT)),
)
POD_MONITOR: Final = _resource(
    _MONITORING,
    "PodMonitor",
    object_of(
        "jobLabel selector podMetricsEndpoints", jobLabel=TEXT, selector=_SELECTOR, podMetricsEndpoints=_list(_ENDPOINT)
    ),
)
_ALERT: Final = object_of(
    "alert expr labels annotations",
    alert=TEXT,
    expr=TEXT,
    labels=_TEXTS,
    annotations=_TEXTS,
    **{"for": DURATION},
)
PROMETHEUS_RULE: Final = _resource(
    _MONITORING,
    "PrometheusRule",
    object_of("groups", groups=_list(object_of("name rules", name=TEXT, interval=DURATION, rules=_list(_ALERT)))),
)

#: A template of pods, whose spec others validate.
_POD: Final = object_of("metadata spec", metadata=object_of("labels", labels=_TEXTS), spec={"type": "object"})
LEADER_WORKER_SET: Final = _resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    object_of(
        "replicas leaderWorkerTemplate",
        replicas=COUNT,
        rolloutStrategy=object_of(
            "type rollingUpdateConfiguration",
            type=one_of("RollingUpdate"),
            rollingUpdateConfiguration=object_of("maxUnavailable maxSurge", maxUnavailable=COUNT, maxSurge=COUNT),
        ),
        leaderWorkerTemplate=object_of(
            "size leaderTemplate workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
            leaderTemplate=_POD,
            workerTemplate=_POD,
        ),
    ),
)

_GATEWAY_API: Final = "gateway.networking.k8s.io/v1"
GATEWAY: Final = _resource(
    _GATEWAY_API,
    "Gateway",
    object_of(
        "gatewayClassName listeners",
        gatewayClassName=TEXT,
        listeners=_list(
            # Without `tls`, keys could be read on the way.
            object_of(
                "name port protocol hostname tls",
                name=TEXT,
                port=PORT,
                protocol={"const": "HTTPS"},
                hostname=HOST,
                tls=object_of(
                    "mode certificateRefs",
                    mode={"const": "Terminate"},
                    certificateRefs=_list(object_of("name", name=TEXT, namespace=TEXT)),
                ),
                allowedRoutes=object_of("namespaces", namespaces=object_of("from", **{"from": one_of("All", "Same")})),
            )
        ),
    ),
)
HTTP_ROUTE: Final = _resource(
    _GATEWAY_API,
    "HTTPRoute",
    object_of(
        "parentRefs hostnames rules",
        parentRefs=_list(object_of("name", name=TEXT, namespace=TEXT, sectionName=TEXT, port=PORT)),
        hostnames=_list(HOST),
        rules=_list(
            object_of(
                "matches backendRefs",
                matches=_list(
                    object_of("path", path=object_of("type value", type=one_of("PathPrefix", "Exact"), value=TEXT))
                ),
                timeouts=object_of("", request=DURATION, backendRequest=DURATION),
                backendRefs=_list(object_of("name port", name=TEXT, port=PORT)),
            )
        ),
    ),
)
SCHEMAS: Final = KEDA | {
    "ServiceMonitor": SERVICE_MONITOR,
    "PodMonitor": POD_MONITOR,
    "PrometheusRule": PROMETHEUS_RULE,
    "Gateway": GATEWAY,
    "HTTPRoute": HTTP_ROUTE,
}
