"""Clusters of etcd of the tests' own: one node or three, with TLS and users where asked for.

etcd is unpacked from two suites of Debian: 3.4 from this machine's own release or an older one, 3.5
from a newer one. Nothing of the system changes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from servers.ports import free_port
from servers.processes import NoServer, ServerProcess
from servers.programs import NoProgram, fetched, program, unpack, unpacked_command

from epochal.errors import EpochalError
from epochal.storage.etcd import EtcdStore
from epochal.storage.etcd_client import Reply

OLD, NEW = "bookworm", "trixie"
"""Debian's suites: etcd 3.4 and 3.5."""
_ELECTION = ("--heartbeat-interval=50", "--election-timeout=500")


def _room() -> str | None:
    """
    Memory, where there is a file system of it: a killed server keeps what the kernel has, and only
    a machine's crash needs the disk.
    """
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) else None


@cache
def _program(name: str, suite: str) -> tuple[str, ...]:
    try:
        home = fetched(
            f"etcd-{suite}",
            lambda home: unpack("etcd-server etcd-client", suite, home / "root"),
            lock="etcd",
        )
    except NoProgram as error:
        raise NoServer(str(error)) from error
    return tuple(unpacked_command(home / "root", f"usr/bin/{name}"))


class Certificates:
    """A certificate authority, a server's certificate for 127.0.0.1, and a client's for a user."""

    def __init__(self, folder: Path, user: str) -> None:
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._run("req", "-x509", *self._new("ca"), "-subj", "/CN=tests", "-out", str(self.ca))
        self.server = self._signed("server", "/CN=etcd", "subjectAltName=IP:127.0.0.1")
        self.client = self._signed("client", f"/CN={user}", "extendedKeyUsage=clientAuth")

    def environment(self) -> dict[str, str]:
        """For etcdctl, and for stores."""
        certificate, key = self.client
        return {
            "ETCDCTL_CACERT": str(self.ca),
            "ETCDCTL_CERT": str(certificate),
            "ETCDCTL_KEY": str(key),
        }

    def _new(self, name: str) -> Sequence[str]:
        key = str(self._folder / f"{name}.key")
        return ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key)

    def _signed(self, name: str, subject: str, extension: str) -> tuple[Path, Path]:
        request = self._folder / f"{name}.csr"
        certificate = self._folder / f"{name}.pem"
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"{extension}\n", encoding="utf-8")
        self._run("req", *self._new(name), "-subj", subject, "-out", str(request))
        authority = ("-CA", str(self.ca), "-CAkey", str(self._folder / "ca.key"))
        self._run(
            *("x509", "-req", "-in", str(request), *authority, "-CAcreateserial", "-days", "2"),
            *("-extfile", str(extensions), "-out", str(certificate)),
        )
        return certificate, self._folder / f"{name}.key"

    def _run(self, *words: str) -> None:
        command = [program("openssl", "openssl"), *words]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder)


class EtcdNode(ServerProcess):
    """One member. Its data outlives its process."""

    title = "etcd"

    def __init__(self, name: str, folder: Path, suite: str, options: Sequence[str]) -> None:
        super().__init__(folder)
        self.name = name
        self.port, self.peer_port = free_port(), free_port()
        self.certificates: Certificates | None = None
        self.members: Sequence[EtcdNode] = (self,)
        self._suite = suite
        self._options = options

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def peer(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def _command(self) -> list[str]:
        scheme = "http" if self.certificates is None else "https"
        client = f"{scheme}://{self.endpoint}"
        return [
            *_program("etcd", self._suite),
            f"--name={self.name}",
            f"--data-dir={self.folder / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={self.peer}",
            f"--initial-advertise-peer-urls={self.peer}",
            "--initial-cluster=" + ",".join(f"{one.name}={one.peer}" for one in self.members),
            *_ELECTION,
            *self._tls(),
            *self._options,
        ]

    def _tls(self) -> list[str]:
        if self.certificates is None:
            return []
        certificate, key = self.certificates.server
        return [
            f"--cert-file={certificate}",
            f"--key-file={key}",
            f"--trusted-ca-file={self.certificates.ca}",
            "--client-cert-auth",
        ]

    def _is_ready(self) -> bool:
        """It listens; whether it has a leader is asked of the cluster."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class EtcdCluster:
    """Members that are killed, stopped and started again one by one."""

    def __init__(
        self,
        folder: Path,
        *,
        size: int = 1,
        suite: str = OLD,
        options: Sequence[str] = (),
        certificates: Certificates | None = None,
    ) -> None:
        self.folder = folder
        self._suite = suite
        self._certificates = certificates
        self.nodes = []
        for at in range(size):
            (folder / f"n{at}").mkdir()
            self.nodes.append(EtcdNode(f"n{at}", folder / f"n{at}", suite, options))
        for node in self.nodes:
            node.members, node.certificates = self.nodes, certificates

    def start(self) -> None:
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.await_ready()

    def url(self, prefix: str, *, login: str = "") -> str:
        scheme = "etcd" if self._certificates is None else "etcds"
        start = f"{login}@" if login else ""
        return f"{scheme}://{start}{','.join(one.endpoint for one in self.nodes)}/{prefix}"

    def leader(self) -> EtcdNode | None:
        """The member that a majority follows; None while there is none."""
        store = EtcdStore(self.url("tests"))
        try:
            for endpoint, status in store.client.ask_each("Maintenance/Status"):
                if isinstance(status, Reply) and status.part(1).number(2) == status.number(4):
                    return next(one for one in self.nodes if one.endpoint == endpoint)
        finally:
            store.close()
        return None

    def etcdctl(self, *words: str, user: str = "", answer: str = "") -> str:
        """Run Debian's own client against the first node."""
        scheme = "http" if self._certificates is None else "https"
        certificates = {} if self._certificates is None else self._certificates.environment()
        done = subprocess.run(
            [*_program("etcdctl", self._suite), *words],
            check=False,
            capture_output=True,
            text=True,
            input=answer,
            env={
                "ETCDCTL_API": "3",
                "ETCDCTL_ENDPOINTS": f"{scheme}://{self.nodes[0].endpoint}",
                **certificates,
                **({"ETCDCTL_USER": user} if user else {}),
            },
        )
        assert done.returncode == 0, f"etcdctl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def keys(self, prefix: str) -> list[str]:
        """All keys below a prefix, those of the store's own too."""
        return self.etcdctl("get", f"/{prefix}", "--prefix", "--keys-only").split()

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


@contextmanager
def running_etcd(
    *,
    size: int = 1,
    suite: str = OLD,
    options: Sequence[str] = (),
    tls_user: str | None = None,
    is_synced: bool = False,
) -> Iterator[EtcdCluster]:
    """A cluster for the time of a block, ready to be written to; synced: to a disk."""
    with ExitStack() as stack:
        room = None if is_synced else _room()
        options = (*options, f"--unsafe-no-fsync={str(not is_synced).lower()}")
        folder = Path(tempfile.mkdtemp(prefix="epochal-etcd-", dir=room))
        stack.callback(partial(shutil.rmtree, folder, ignore_errors=True))
        certificates = None if tls_user is None else Certificates(folder, tls_user)
        if certificates is not None:
            before = {name: os.environ.get(name) for name in certificates.environment()}
            stack.callback(partial(_restore, before))
            os.environ.update(certificates.environment())
        cluster = EtcdCluster(
            folder, size=size, suite=suite, options=options, certificates=certificates
        )
        stack.callback(cluster.stop)
        cluster.start()
        store = EtcdStore(cluster.url("tests"))
        stack.callback(store.close)
        try:
            store.put("ready", b"")  # waits until there is a leader
        except EpochalError as error:
            raise NoServer(f"etcd takes no write: {error}") from error
        yield cluster


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
