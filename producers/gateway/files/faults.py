"""Turns errors of the folder, or the bucket, that files' content is in into what callers see."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from producers.connection.aws import AwsError, AwsNotInstalled
from producers.connection.log_throttle import warn_throttled
from producers.gateway.http.errors import Problem, unavailable

logger = logging.getLogger(__name__)

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def telling() -> Iterator[None]:
    """Within it, an error of the folder or the bucket becomes a Problem; the log has its own words."""
    try:
        yield
    except (AwsError, AwsNotInstalled) as error:
        said = "The bucket for files does not answer, or refuses; the gateway's log says why."
        raise _problem(error, said) from error
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError | TimeoutError):  # of the store
            raise
        if error.errno in _FULL:
            raise _problem(error, "The disk for files is full: no file is taken for now.", "storage_full") from error
        raise _problem(error, "This gateway cannot use its folder for files; its log says why.") from error


def _problem(error: Exception, message: str, code: str = "file_unavailable") -> Problem:
    warn_throttled(logger, "--files-dir cannot be used: %s", error)
    return unavailable(message, code=code)
