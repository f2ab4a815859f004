"""A small strict API server of Kubernetes: one Deployment, its scale, its pods, and who may do what. Over real HTTP."""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.waiting import PATIENCE_S
from tests.workers.http_server import Handler, HttpServer

COST: Final = "controller.kubernetes.io/pod-deletion-cost"
SCALE: Final = "/apis/apps/v1/namespaces/default/deployments/worker-tiny/scale"
PODS: Final = "/api/v1/namespaces/default/pods"
HPAS: Final = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
SELECTOR: Final = "app=penstock,pool in (tiny,tiny-2)"


class Refused(Exception):
    """`args`: status and message."""


class Kubernetes(HttpServer):
    """`room`: pods that find a node. `rights`: what the token's role allows. `silent`: answers nothing while set."""

    def __init__(self, folder: Path) -> None:
        self.replicas = 0
        self.room = 100
        self.pods: dict[str, dict[str, Any]] = {}
        self.hpas: list[str] = []
        self.rights = {"get scale", "patch scale", "list pods", "patch pods", "list hpas"}
        self.token = "one"
        self.asked: list[str] = []
        self.conflict = False
        self.answering = threading.Event()
        self.answering.set()
        self._numbers = count()
        kubernetes = self

        class Api(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer("get")

            def do_PATCH(self) -> None:
                self.answer("patch")

            def answer(self, verb: str) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                kubernetes.answering.wait(PATIENCE_S)
                try:
                    if self.headers.get("authorization") != f"Bearer {kubernetes.token}":
                        raise Refused(401, "Unauthorized")
                    status, said = 200, kubernetes.route(verb, self.path, self.headers.get("content-type"), data)
                except Refused as refused:
                    status, message = refused.args
                    said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
                    said["message"] = message
                body = json.dumps(said).encode()
                with suppress(OSError):  # the client may have given up
                    self.tell(status, body, {"content-type": "application/json"})

        super().__init__(Api)
        self.token_file = folder / "token"
        self.token_file.write_text(self.token)
        self.config = folder / "kubeconfig"
        user = {"name": "me", "user": {"tokenFile": str(self.token_file)}}
        context = {"name": "here", "context": {"cluster": "c", "user": "me", "namespace": "other"}}
        cluster = {"name": "c", "cluster": {"server": self.url}}
        self.config.write_text(  # JSON is YAML
            json.dumps({"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "here"})
        )

    def route(self, verb: str, target: str, kind: str | None, data: bytes) -> dict[str, Any]:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if path == SCALE:
            return self._of_scale(verb, self._patch(verb, kind, data))
        if path == HPAS and verb == "get":
            self._need("list hpas")
            spec = {"maxReplicas": 3, "scaleTargetRef": {"kind": "Deployment", "apiVersion": "apps/v1"}}
            return _list([_named(n, {"spec": {**spec, "scaleTargetRef": _target(n)}}) for n in self.hpas])
        if path == PODS and verb == "get":
            self._need("list pods")
            assert query.pop("labelSelector", None) == [SELECTOR], "pods of others would be listed"
            assert set(query) <= {"limit"}
            return _list(list(self.pods.values()))
        if verb == "patch" and (found := re.fullmatch(f"{PODS}/([^/]+)", path)):
            return self._of_pod(found[1], self._patch(verb, kind, data))
        raise Refused(404, f'the server could not find the requested resource: {verb} "{path}"')

    def _of_scale(self, verb: str, patch: dict[str, Any]) -> dict[str, Any]:
        self._need(f"{verb} scale")
        if verb == "patch":
            if self.conflict:
                raise Refused(409, "the object has been modified")
            assert list(patch) == ["spec"]
            assert list(patch["spec"]) == ["replicas"]
            self.replicas = int(patch["spec"]["replicas"])
            self.settle()
        spec, status = {"replicas": self.replicas}, {"replicas": len(self.pods), "selector": SELECTOR}
        return _named("worker-tiny", {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec, "status": status})

    def _of_pod(self, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        self._need("patch pods")
        if name not in self.pods:
            raise Refused(404, f'pods "{name}" not found')
        annotations = self.pods[name]["metadata"]["annotations"]
        for key, value in patch.pop("metadata").pop("annotations").items():
            assert value is None or -(2**31) <= int(value) < 2**31
            annotations.pop(key, None) if value is None else annotations.update({key: value})
        assert not patch
        return self.pods[name]

    def _patch(self, verb: str, kind: str | None, data: bytes) -> dict[str, Any]:
        if verb == "get":
            assert not data
            return {}
        if kind != "application/merge-patch+json":
            raise Refused(415, f"the body of the request was in an unknown format: {kind}")
        patch: dict[str, Any] = json.loads(data)
        return patch

    def _need(self, right: str) -> None:
        self.asked.append(right)
        if right not in self.rights:
            raise Refused(403, f'User "me" cannot {right}')

    def settle(self) -> None:
        """As the ReplicaSet's controller does: pods that are missing come, those too many go by readiness and cost."""
        while len(self.pods) < self.replicas:
            name = f"worker-tiny-{next(self._numbers)}"
            self.pods[name] = pod(name, scheduled=len(self.pods) < self.room)
        for name in sorted(self.pods, key=self._rank)[: len(self.pods) - self.replicas]:
            del self.pods[name]

    def _rank(self, name: str) -> tuple[bool, int]:
        one = self.pods[name]
        ready = one["status"]["phase"] == "Running"
        return ready, int(one["metadata"]["annotations"].get(COST, 0))

    def costs(self) -> dict[str, str]:
        """Pod -> its deletion cost, where it has one."""
        found = {name: one["metadata"]["annotations"].get(COST) for name, one in self.pods.items()}
        return {name: cost for name, cost in found.items() if cost is not None}

    def close(self) -> None:
        self.answering.set()
        super().close()


def pod(name: str, *, scheduled: bool = True) -> dict[str, Any]:
    """A ready pod, or one that no node has room for."""
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    container = {"name": "w", "image": "i", "imageID": "i", "ready": True, "restartCount": 0, "state": state}
    conditions = [{"type": "Ready", "status": "True"}]
    lacking = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}]
    return _named(
        name,
        {
            "spec": {"containers": [{"name": "w"}]},
            "status": {
                "phase": "Running" if scheduled else "Pending",
                "conditions": conditions if scheduled else lacking,
                "containerStatuses": [container] if scheduled else [],
            },
        },
    )


def crash(one: dict[str, Any], restarts: int, waiting: str = "CrashLoopBackOff", ended: str = "OOMKilled") -> None:
    """Let a pod's container end again and again."""
    one["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    container = one["status"]["containerStatuses"][0]
    container |= {"ready": False, "restartCount": restarts, "state": {"waiting": {"reason": waiting, "message": "m"}}}
    container["lastState"] = {"terminated": {"exitCode": 137, "reason": ended}}


def _named(name: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": {}}, **more}


def _list(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}


def _target(hpa: str) -> dict[str, str]:
    """An HPA is named `NAME-of-DEPLOYMENT`."""
    return {"kind": "Deployment", "apiVersion": "apps/v1", "name": hpa.partition("-of-")[2]}
