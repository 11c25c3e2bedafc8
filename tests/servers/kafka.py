"""An Apache Kafka of the tests' own: one broker on loopback, from Maven's jars.

It has a listener for every way of connecting, and can be killed and started again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from servers.jvm import QUICK
from servers.maven import dependencies
from servers.ports import free_port
from servers.processes import ServerProcess
from servers.programs import jdk_java, program

RELEASE = "4.3.1"
USERS = {"alice": "alice-secret", "bob": "bob-secret"}
"""Known to PLAIN and to both SCRAM mechanisms."""
_LISTENERS = {
    "PLAIN": "PLAINTEXT",
    "SASL": "SASL_PLAINTEXT",
    "TLS": "SSL",
    "MTLS": "SSL",
    "SASLTLS": "SASL_SSL",
    "CONTROLLER": "PLAINTEXT",
}
_LOGGING = """Configuration:
  status: error
  Appenders:
    Console:
      name: out
      PatternLayout:
        pattern: "%d %p %m (%c)%n%throwable{3}"
  Loggers:
    Root:
      level: WARN
      AppenderRef:
        ref: out
"""


def jars(release: str = RELEASE) -> Path:
    """The folder with the broker's jars."""
    return dependencies(
        f"kafka-{release}",
        f"org.apache.kafka:kafka_2.13:{release}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
    )


def run_java(source: Path, *arguments: str, stdin: str = "") -> str:
    """What a single-file Java program prints, with Kafka's own classes at hand."""
    ran = subprocess.run(
        [jdk_java(), *QUICK, "-cp", f"{jars()}/*", str(source), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{source.name} failed:\n{ran.stderr}")
    return ran.stdout


class Certificates:
    """An authority of our own, and what it signed: files in PEM."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.server = folder / "server.pem"
        self.client = folder / "client.pem"
        self.client_key = folder / "client.key"
        self._folder = folder
        self._make()

    def _make(self) -> None:
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", *_days())
        self._sign("server", "subjectAltName=DNS:localhost")
        self._sign("client", "extendedKeyUsage=clientAuth")
        key = (self._folder / "server.key").read_text()
        self.server.write_text(key + self.server.read_text() + self.ca.read_text())

    def _sign(self, name: str, extension: str) -> None:
        (self._folder / f"{name}.ext").write_text(extension)
        subject = ["-subj", f"/CN={name}"]
        request = [*_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", *subject]
        self._openssl("req", *request)
        issuer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        files = ["-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext"]
        self._openssl("x509", "-req", *issuer, *files)

    def _openssl(self, *arguments: str) -> None:
        command = [program("openssl", "openssl"), *arguments]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=60)


_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def _days() -> list[str]:
    return ["-days", "2", "-subj", "/CN=epochal tests"]


@dataclass(frozen=True)
class Seat:
    """Which broker of a cluster one is, and where all its controllers listen."""

    node_id: int
    controllers: Mapping[int, int]
    cluster_id: str


class KafkaServer(ServerProcess):
    """A broker process with its own folder. Ports stay the same over restarts."""

    title = "Apache Kafka"
    ready_within_s = 180.0
    process_options = MappingProxyType({"env": {**os.environ, "LC_ALL": "C.UTF-8"}})

    def __init__(
        self,
        folder: Path,
        *,
        features: Mapping[str, int] | None = None,
        settings: Mapping[str, str] | None = None,
        release: str = RELEASE,
        seat: Seat | None = None,
        jvm: Sequence[str] = QUICK,
    ) -> None:
        """`seat` is its place in a cluster; alone it is its own controller."""
        self._jvm = tuple(jvm)
        super().__init__(folder)
        self.certificates = Certificates(folder)
        self.ports = {listener: free_port() for listener in _LISTENERS}
        if seat is not None:
            self.ports["CONTROLLER"] = seat.controllers[seat.node_id]
        self._seat = seat or Seat(1, {1: self.ports["CONTROLLER"]}, str(uuid.uuid4()))
        self._jars = jars(release)
        (folder / "log4j2.yaml").write_text(_LOGGING)
        self._properties = folder / "server.properties"
        lines = {**self._settings(), **(settings or {})}
        self._properties.write_text("\n".join(f"{k}={v}" for k, v in lines.items()))
        self._format(features or {})

    def address(self, listener: str = "PLAIN") -> str:
        return f"localhost:{self.ports[listener]}"

    def _settings(self) -> dict[str, str]:
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        plain += "".join(f' user_{user}="{password}"' for user, password in USERS.items()) + ";"
        bearer = (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
            ' unsecuredLoginStringClaim_sub="admin";'
        )
        found = {
            "process.roles": "broker,controller",
            "node.id": str(self._seat.node_id),
            "controller.quorum.voters": ",".join(
                f"{node}@localhost:{port}" for node, port in self._seat.controllers.items()
            ),
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(f"{n}://localhost:{p}" for n, p in self.ports.items()),
            "listener.security.protocol.map": ",".join(f"{n}:{p}" for n, p in _LISTENERS.items()),
            "inter.broker.listener.name": "PLAIN",
            "log.dirs": str(self.folder / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            # A killed broker's registration ends sooner than by default, so a restart is quicker.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "auto.create.topics.enable": "false",
            # Records of tests may be of any time.
            "log.retention.ms": "-1",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificates.server),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.ca),
            "listener.name.mtls.ssl.client.auth": "required",
        }
        for listener in ("sasl", "sasltls"):
            prefix = f"listener.name.{listener}"
            found |= {
                f"{prefix}.sasl.enabled.mechanisms": (
                    "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER"
                ),
                f"{prefix}.plain.sasl.jaas.config": plain,
                f"{prefix}.scram-sha-256.sasl.jaas.config": scram,
                f"{prefix}.scram-sha-512.sasl.jaas.config": scram,
                f"{prefix}.oauthbearer.sasl.jaas.config": bearer,
            }
        return found

    def _java(self, main: str, *arguments: str) -> list[str]:
        options = ["-Xmx512m", *self._jvm]
        logging = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.yaml'}"
        return [
            program("java", "default-jre-headless"),
            *options,
            logging,
            "-cp",
            f"{self._jars}/*",
            main,
            *arguments,
        ]

    def _format(self, features: Mapping[str, int]) -> None:
        command = self._java("kafka.tools.StorageTool", "format", "-c", str(self._properties))
        command += ["-t", self._seat.cluster_id]
        for name, level in features.items():
            command += ["--feature", f"{name}={level}"]
        for user, password in USERS.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["--add-scram", f"{mechanism}=[name={user},password={password}]"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if ran.returncode:
            raise RuntimeError(f"formatting Kafka's folder failed:\n{ran.stdout}{ran.stderr}")

    def _command(self) -> list[str]:
        return self._java("kafka.Kafka", str(self._properties))

    def _is_ready(self) -> bool:
        return all(map(_is_listening, self.ports.values()))


class KafkaCluster:
    """Brokers that replicate what they hold: any one of them may be killed."""

    def __init__(self, folder: Path, size: int = 3, **options: Any) -> None:
        controllers = {number: free_port() for number in range(1, size + 1)}
        cluster_id = str(uuid.uuid4())
        settings = {**_REPLICATED, **options.pop("settings", {})}
        self.brokers: dict[int, KafkaServer] = {}
        for node_id in controllers:
            home = folder / str(node_id)
            home.mkdir(parents=True)
            seat = Seat(node_id, controllers, cluster_id)
            self.brokers[node_id] = KafkaServer(home, settings=settings, seat=seat, **options)

    def address(self) -> str:
        return ",".join(broker.address() for broker in self.brokers.values())

    def start(self) -> None:
        try:
            for broker in self.brokers.values():
                broker.launch()
            for broker in self.brokers.values():
                broker.await_ready()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for broker in self.brokers.values():
            broker.kill()


_REPLICATED = {
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
}


def _is_listening(port: int) -> bool:
    try:
        with socket.create_connection(("localhost", port), timeout=1):
            return True
    except OSError:
        return False
