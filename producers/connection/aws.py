"""Connections to AWS, and to other servers with its protocols; its errors as the rest of Penstock knows them.

boto3's own chain finds the credentials, and the region if a URL names none: environment, profile, role.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from producers.connection.trouble import Trouble
from producers.errors import PenstockError

#: Longest time (s) to connect, and without an answer; a long poll adds its own.
CONNECT_S: Final = 5.0
SILENT_S: Final = 15.0

_DENIED: Final = frozenset(
    {
        *("AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation", "OptInRequired"),
        *("InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException", "InvalidAccessKeyId"),
        *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "RequestTimeTooSkewed", "AccountProblem"),
        *("InvalidSignatureException", "IncompleteSignature", "MissingAuthenticationToken", "InvalidSecurity"),
        *("KMS.AccessDeniedException", "KmsAccessDenied", "403", "NoCredentials"),
    }
)
_MISSING: Final = frozenset(
    {
        *("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "NonExistentQueue"),
        *("NoSuchBucket", "NotFound", "NotFoundException", "ResourceNotFoundException"),
    }
)
_AWAY: Final = frozenset(
    {
        *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "TooManyRequestsException"),
        *("RequestThrottledException", "RequestLimitExceeded", "SlowDown", "ServiceUnavailable", "InternalError"),
        *("InternalFailure", "InternalServerError", "RequestTimeout", "OverLimit", "AWS.SimpleQueueService.OverLimit"),
        *("KmsThrottled", "500", "502", "503", "504"),
    }
)
_ELSEWHERE: Final = frozenset(
    {*("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301")}
)
_ADVICE: Final = {
    **dict.fromkeys(_ELSEWHERE, "it is in another region; name its own as region in the URL"),
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "InvalidSignatureException": "wrong credentials, or this machine's clock is wrong",
    "SignatureDoesNotMatch": "wrong credentials, or this machine's clock is wrong",
    "ExpiredToken": "the credentials have expired",
    "ExpiredTokenException": "the credentials have expired",
    "RequestExpired": "the credentials have expired, or this machine's clock is wrong",
}


class AwsError(OSError):
    """AWS refused or failed a call. `trouble`: whether a retry may help; None for the call's own error."""

    def __init__(self, message: str, code: str, trouble: Trouble | None) -> None:
        super().__init__(message)
        self.code = code
        """AWS's own, such as `AccessDenied`; `Unreachable` where it did not answer."""
        self.trouble = trouble


class AwsMissing(AwsError):
    """The queue, bucket or topic does not exist, or not in this region or account."""


class AwsNotInstalled(PenstockError):
    """boto3 is missing."""


def check_no_password(url: str) -> None:
    """Raise ValueError, which does not repeat it, for the URL of a broker or a bucket that has a user or a password."""
    parts = urlsplit(url)
    if "@" in parts.netloc or "@" in dict(parse_qsl(parts.query)).get("endpoint_url", ""):
        raise ValueError(
            f"an {parts.scheme}:// URL has a user or a password, which logs would show: leave them out. boto3 finds "
            "credentials in the environment, a profile or a role"
        )


def client(
    service: str,
    region: str | None,
    endpoint_url: str | None = None,
    *,
    wait_s: float = 0.0,
    silent_s: float = SILENT_S,
) -> Any:
    """A boto3 client, which all threads may share; nothing connects before the first call.

    `wait_s`: longest time (s) that a call may wait at the server by intention, as a long poll does; `silent_s`: without
    an answer beyond that. A call is tried twice; its caller goes on trying. Raises AwsNotInstalled; AwsError without a
    region.
    """
    try:
        import boto3  # noqa: F401 - whether it is there
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise AwsNotInstalled(f"{service.upper()} needs boto3: pip install 'penstock[aws]'") from error
    config = Config(
        **(_s3(endpoint_url) if service == "s3" else {}),
        connect_timeout=min(CONNECT_S, silent_s),
        read_timeout=silent_s + wait_s,
        retries={"mode": "standard", "total_max_attempts": 2},
        max_pool_connections=32,
        tcp_keepalive=True,
    )
    try:
        return _session(region).client(service, endpoint_url=endpoint_url or None, config=config)
    except (BotoCoreError, ValueError) as error:
        raise AwsError(f"cannot use {service.upper()}: {error}", "Invalid", Trouble.UNUSABLE) from error


def _session(region: str | None) -> Any:
    """A boto3 session of its own, since no two threads may use one; it finds credentials anew."""
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", loader := _loader(core.get_config_variable("data_path")))
    session = boto3.session.Session(region_name=region or None, botocore_session=core)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session appends boto3's own
    return session


@cache
def _loader(path: str | None) -> Any:
    """botocore's descriptions of services. Each session would read them anew, which takes 50 ms."""
    import botocore.loaders

    return botocore.loaders.create_loader(path)


def _s3(endpoint_url: str | None) -> dict[str, Any]:
    """Settings for S3. Signed URLs then name the bucket's region, and also open what is encrypted with KMS."""
    return {"signature_version": "s3v4", "s3": {"addressing_style": "path" if endpoint_url else "virtual"}}


def partition_of(region: str) -> str:
    """The part of AWS that a region is in, as ARNs name it."""
    kinds = {"cn-": "aws-cn", "us-gov-": "aws-us-gov", "eusc-": "aws-eusc"}
    return next((partition for prefix, partition in kinds.items() if region.startswith(prefix)), "aws")


@contextmanager
def aws_errors(doing: str, permission: str) -> Iterator[None]:
    """Within it, boto3's errors become AwsError.

    `doing`: the attempt, with its queue or bucket ("receive from queue pen-tiny"); `permission`: the one that the call
    needs ("sqs:ReceiveMessage"). The error's text has both.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        details = error.response.get("Error", {})
        status = str(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        raise refusal(doing, permission, details.get("Code", status), details.get("Message", ""), status) from error
    except BotoCoreError as error:
        raise _unreached(doing, permission, error) from error


def refusal(doing: str, permission: str, code: str, message: str, status: str = "") -> AwsError:
    """The error for a code that AWS answered, also for one entry of a batch."""
    text = f"cannot {doing}: {code}: {_ADVICE.get(code) or message or 'no reason given'}"
    if code in _MISSING or status == "404":
        return AwsMissing(text, code, None)
    if code in _AWAY or status.startswith("5") or status == "429":
        return AwsError(text, code, Trouble.AWAY)  # OverLimit too, though its status is 403
    if code in _DENIED or status in ("401", "403"):
        return AwsError(f"{text} (it needs {permission})", code, Trouble.DENIED)
    if code in _ELSEWHERE:
        return AwsError(text, code, Trouble.UNUSABLE)
    return AwsError(text, code, None)


def _unreached(doing: str, permission: str, error: Exception) -> AwsError:
    from botocore import exceptions
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    if isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        return AwsError(f"cannot {doing}: {error}", "Unreachable", Trouble.AWAY)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        text = f"cannot {doing}: no AWS credentials were found (it needs {permission})"
        return AwsError(text, "NoCredentials", Trouble.DENIED)
    if isinstance(error, exceptions.ParamValidationError):
        return AwsError(f"cannot {doing}: {error}", "Invalid", None)
    return AwsError(f"cannot {doing}: {error}", type(error).__name__, Trouble.AWAY)
