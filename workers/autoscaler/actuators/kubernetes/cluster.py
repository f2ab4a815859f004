"""The requests to Kubernetes' API server, and its refusals in words."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from workers.autoscaler.actuators.base import ActuatorError
from workers.autoscaler.actuators.kubernetes.pods import COST

logger = logging.getLogger(__name__)

#: Longest time (s) that one request waits; and pods of one answer.
REQUEST_S: Final = 4.0
CHUNK: Final = 500


class Cluster:
    """The API of one Deployment. Every method raises ActuatorError."""

    def __init__(self, namespace: str, deployment: str, context: str | None) -> None:
        """Raises ModuleNotFoundError without the library, ValueError without credentials."""
        import lightkube  # the first: its name is in the error where the extra is not installed
        from httpx2 import Timeout

        self._namespace, self._deployment = namespace, deployment
        self._client = lightkube.AsyncClient(_config(context), namespace=namespace, timeout=Timeout(REQUEST_S))
        self._sees_rivals = True

    async def scale(self) -> Any:
        """The Deployment's scale: `spec.replicas`, `status.selector`."""
        from lightkube.resources.apps_v1 import DeploymentScale

        async with _told(f"read the scale of {self._where}", "get on deployments/scale"):
            return await self._client.get(DeploymentScale, self._deployment)

    async def set_replicas(self, wanted: int) -> None:
        from lightkube.resources.apps_v1 import DeploymentScale
        from lightkube.types import PatchType

        async with _told(f"scale {self._where} to {wanted}", "patch on deployments/scale"):
            patch = {"spec": {"replicas": wanted}}
            await self._client.patch(DeploymentScale, self._deployment, patch, patch_type=PatchType.MERGE)

    async def pods(self, selector: str) -> list[Any]:
        """All pods of a selector, as the API writes it."""
        from lightkube.operators import exists
        from lightkube.resources.core_v1 import Pod

        if not selector:  # every pod of the namespace
            raise ActuatorError(f"{self._where} has no selector, so its pods cannot be told from others")
        async with _told(f"list the pods of {self._where}", "list on pods"):
            # The library writes `exists` of a label as the label alone: so the selector goes out as it came.
            return [pod async for pod in self._client.list(Pod, labels={selector: exists()}, chunk_size=CHUNK)]

    async def set_cost(self, pod: str, cost: str | None) -> None:
        """Set a pod's deletion cost; None removes it. A pod that is gone needs none."""
        from lightkube.resources.core_v1 import Pod
        from lightkube.types import PatchType

        patch = {"metadata": {"annotations": {COST: cost}}}
        async with _told(f"set the deletion cost of pod {pod}", "patch on pods", gone_is_fine=True):
            await self._client.patch(Pod, pod, patch, patch_type=PatchType.MERGE)

    async def rival(self) -> str:
        """The HorizontalPodAutoscaler of the same Deployment; empty where there is none, or none may be listed."""
        from lightkube.resources.autoscaling_v2 import HorizontalPodAutoscaler

        try:
            async with _told(f"look for autoscalers of {self._where}", "list on horizontalpodautoscalers"):
                async for one in self._client.list(HorizontalPodAutoscaler):
                    target = one.spec.scaleTargetRef
                    if (target.kind, target.name) == ("Deployment", self._deployment):
                        return one.metadata.name or "" if one.metadata else ""
        except ActuatorError as error:
            if not isinstance(error, Denied):
                raise
            if self._sees_rivals:
                logger.info("%s. So a HorizontalPodAutoscaler of the same Deployment would not be noticed", error)
            self._sees_rivals = False
        return ""

    @property
    def _where(self) -> str:
        return f"deployment {self._namespace}/{self._deployment}"

    async def aclose(self) -> None:
        await self._client.close()


class Denied(ActuatorError):
    """The API server did not allow it."""


def _config(context: str | None) -> Any:
    """The connection's settings: of the file in KUBECONFIG, else the pod's service account, else ~/.kube/config."""
    from lightkube import KubeConfig
    from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG
    from lightkube.core.exceptions import ConfigError

    named = os.environ.get("KUBECONFIG")
    file = named or DEFAULT_KUBECONFIG
    try:
        return (KubeConfig.from_file(file) if named or context else KubeConfig.from_env()).get(context)
    except ConfigError as error:
        advice = "Run it in a pod with a service account, or name one file in KUBECONFIG"
        raise ValueError(f"no way to a Kubernetes cluster: {error}. {advice}") from error
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"the kubeconfig {file} makes no sense: {error!r}") from error


@asynccontextmanager
async def _told(doing: str, right: str, *, gone_is_fine: bool = False) -> AsyncIterator[None]:
    """Within it, what the library raises becomes ActuatorError. `right`: what the request needs, for the words."""
    import httpx2
    from lightkube.core.exceptions import ApiError, ConfigError

    try:
        yield
    except ApiError as error:
        if error.status.code != 404 or not gone_is_fine:
            raise _refusal(doing, right, error.status.code or 0, error.status.message or "") from error
    except httpx2.HTTPStatusError as error:  # a proxy's answer, say
        raise _refusal(doing, right, error.response.status_code, error.response.reason_phrase) from error
    except httpx2.TimeoutException as error:
        raise ActuatorError(f"cannot {doing}: the API server did not answer within {REQUEST_S:g} s") from error
    except (httpx2.HTTPError, ConfigError, OSError, ValueError, KeyError) as error:
        raise ActuatorError(f"cannot {doing}: {str(error) or type(error).__name__}") from error


def _refusal(doing: str, right: str, code: int, said: str) -> ActuatorError:
    text = f"cannot {doing}: {code}: {said or 'no reason given'}"
    if code == 401:
        return Denied(f"{text} (the token is not, or no longer, good)")
    if code == 403:
        return Denied(f"{text} (its role needs {right})")
    if code == 404:
        return ActuatorError(f"{text} (wrong namespace or name, or another cluster)")
    if code == 409:
        return ActuatorError(f"{text} (something else changes it at the same time)")
    return ActuatorError(text)
