"""A deployment's secrets, in a folder: passwords of the server's users, TLS, Grafana's password.

    make(folder, hosts) -> password by role -> users.acl (hashes), ROLE.env (URLs), kustomization.yaml
                        -> ca.crt, ca.key, valkey.crt, valkey.key (`openssl`)

Existing files stay, unless all are to be replaced: a second call adds what is missing. The folder is for its owner
alone (0700). In it, what containers mount is readable by all (0644), since their users are others; the rest is 0600.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from producers.admin.roles import ROLES, user_line
from producers.errors import PenstockError

#: Path at which processes find the certificate of the authority, on every platform.
CA: Final = "/etc/penstock/ca.crt"
DAYS: Final = 825
AUTHORITY: Final = (
    "basicConstraints=critical,CA:TRUE,pathlen:0",
    "keyUsage=critical,keyCertSign,cRLSign",
    "subjectKeyIdentifier=hash",
)
SERVER: Final = (
    "basicConstraints=critical,CA:FALSE",
    "keyUsage=critical,digitalSignature",
    "extendedKeyUsage=serverAuth",
    "subjectKeyIdentifier=hash",
    "authorityKeyIdentifier=keyid",
)
#: A user for probes of the server, which asks whether it serves: while it loads its file, PING is refused. It may do
#: nothing else, so that it needs no password.
PROBE_LINE: Final = "user probe on nopass resetchannels resetkeys -@all +ping"
_PRIVATE, _MOUNTED = 0o600, 0o644


class CannotMake(PenstockError):
    """A secret cannot be made; the message says which, and why."""


def make(folder: Path, hosts: Sequence[str], port: int = 6379, *, force: bool = False) -> list[str]:
    """Make missing files; `force`: all. Returns the names of the files that were written.

    `hosts`: names and addresses of the server; URLs have the first, its certificate all. Raises CannotMake.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        files = _Folder(folder, force)
        _users(files, hosts[0], port)
        _certificates(files, hosts)
        files.write("grafana.password", secrets.token_urlsafe(24), _MOUNTED)
        # The key itself is the gateways' to make: docs/run/deploy.md says how.
        files.write("metrics.key", "", _MOUNTED)
        files.write("kustomization.yaml", _kustomization(), _PRIVATE)
    except OSError as error:
        raise CannotMake(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error
    return files.written


class _Folder:
    def __init__(self, path: Path, force: bool) -> None:
        self.path, self.force = path, force
        self.written: list[str] = []

    def lacks(self, *names: str) -> bool:
        return self.force or not all((self.path / name).exists() for name in names)

    def write(self, name: str, text: str, mode: int) -> None:
        """Write a file if it is missing, or all are to be replaced."""
        if self.lacks(name):
            self.replace(name, text, mode)

    def replace(self, name: str, text: str, mode: int) -> None:
        """Write a file, at once or not at all."""
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=".new-")
        try:
            with os.fdopen(handle, "w") as stream:
                os.fchmod(handle, mode)
                stream.write(text)
            os.replace(temporary, self.path / name)
        except BaseException:
            os.unlink(temporary)
            raise
        self.written.append(name)


def _users(files: _Folder, host: str, port: int) -> None:
    """ROLE.env first, which has the password, then users.acl: what a call that died has left undone is completed.

    Rules that an operator changed stay: a user's line is replaced only if it does not match its password.
    """
    lines = {"default": "user default off"}
    if not files.lacks("users.acl"):
        text = (files.path / "users.acl").read_text()
        lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("user ")}
    before = dict(lines)
    lines.setdefault("probe", PROBE_LINE)
    for role in ROLES:
        name = f"{role}.env"
        if files.lacks(name):
            url = f"rediss://{role}:{secrets.token_urlsafe(32)}@{_in_url(host)}:{port}/0?ssl_ca_certs={quote(CA)}"
            files.write(name, f"BROKER_URL={url}\nSTORE_URL={url}\n", _PRIVATE)
        line = user_line(role, _password(files.path / name))
        if line.split()[4] not in lines.get(role, "").split():
            lines[role] = line
    if lines != before or files.lacks("users.acl"):
        files.replace("users.acl", "".join(f"{line}\n" for line in lines.values()), _MOUNTED)


def _password(file: Path) -> str:
    for line in file.read_text().splitlines():
        name, _, url = line.partition("=")
        if name == "STORE_URL" and (password := urlsplit(url).password):
            return unquote(password)
    raise CannotMake(f"{file} has no STORE_URL with a password: remove the file, and it is made anew")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _certificates(files: _Folder, hosts: Sequence[str]) -> None:
    """An authority of this deployment's own, and the server's certificate by it. The authority's key may be kept
    elsewhere once both are made."""
    ca, certificate = files.path / "ca.crt", files.path / "valkey.crt"
    if files.lacks("ca.crt"):
        certificate.unlink(missing_ok=True)
        _pair(files, "ca", _PRIVATE, "Penstock deployment CA", AUTHORITY)
    if files.lacks("valkey.key", "valkey.crt"):
        key = files.path / "ca.key"
        if not key.exists():
            raise CannotMake(
                f"{key} is missing, by which the server's certificate is signed: bring it back, or --force"
            )
        names = ",".join(dict.fromkeys(map(_name, [*hosts, "localhost", "127.0.0.1"])))
        extensions = (*SERVER, f"subjectAltName={names}")
        _pair(files, "valkey", _MOUNTED, "Penstock store", extensions, "-CA", str(ca), "-CAkey", str(key))


def _pair(files: _Folder, name: str, mode: int, subject: str, extensions: Sequence[str], *signed: str) -> None:
    """A key and its certificate. The old certificate goes first: a key without one is made again."""
    (files.path / f"{name}.crt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=files.path, prefix=".new-") as temporary:
        key, certificate = Path(temporary, "key"), Path(temporary, "crt")
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-sha256", "-noenc"),
            *("-config", os.devnull, "-days", str(DAYS), "-subj", f"/CN={subject}"),
            *("-keyout", str(key), "-out", str(certificate), *signed),
            *(word for text in extensions for word in ("-addext", text)),
        )
        files.replace(f"{name}.key", key.read_text(), mode)
        files.replace(f"{name}.crt", certificate.read_text(), _MOUNTED)


def _name(host: str) -> str:
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _openssl(*arguments: str) -> None:
    try:
        ran = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotMake("certificates are made by `openssl`, which is not installed here: install it") from None
    if ran.returncode:
        raise CannotMake(f"openssl (3.0 or later is needed) made no certificate: {ran.stderr.strip()}")


def _kustomization() -> str:
    """Secrets for `kubectl apply -k`: one a role, which its pods alone mount."""
    lines = [
        "# kubectl apply -k of this folder makes the Secrets that the pods of infra/kubernetes take.",
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "namespace: penstock",
        "generatorOptions: {disableNameSuffixHash: true}",
        "configMapGenerator:",
        "  - {name: penstock-ca, files: [ca.crt]}",
        "secretGenerator:",
        *(f"  - {{name: penstock-{role}, envs: [{role}.env]}}" for role in ROLES),
        "  # What a Valkey in the cluster mounts.",
        "  - {name: penstock-valkey, files: [users.acl, valkey.crt, valkey.key]}",
    ]
    return "".join(f"{line}\n" for line in lines)
