"""A schema registry on loopback: the part of the REST interface that its Python client uses.

Kept in memory, with compatibility BACKWARD for Avro as far as fields go: a field that the schema
before did not have needs a default, and one that both have keeps its type. Every request is noted.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_SUBJECT_UNKNOWN, _SCHEMA_UNKNOWN, _INVALID, _INCOMPATIBLE = 40401, 40403, 42201, 409


class Fault(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return self.code if self.code < 1000 else self.code // 100


@dataclass(kw_only=True)
class Registry:
    user: str | None = None
    requests: list[str] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    is_failing: bool = False

    def register(self, subject: str, schema: dict[str, Any]) -> dict[str, Any]:
        self._require_sound(schema)
        known = self.subjects.setdefault(subject, [])
        if known and not self._is_compatible(subject, schema):
            raise Fault(_INCOMPATIBLE, "Schema being registered is incompatible")
        number = self._number(schema)
        if number not in known:
            known.append(number)
        return {"id": number}

    def look_up(self, subject: str, schema: dict[str, Any]) -> dict[str, Any]:
        known = self._versions(subject)
        wanted = _essence(schema)
        for version, number in enumerate(known, 1):
            if _essence(self.schemas[number - 1]) == wanted:
                return {"subject": subject, "id": number, "version": version, **schema}
        raise Fault(_SCHEMA_UNKNOWN, "Schema not found")

    def latest(self, subject: str) -> dict[str, Any]:
        known = self._versions(subject)
        schema = self.schemas[known[-1] - 1]
        return {"subject": subject, "id": known[-1], "version": len(known), **schema}

    def try_on(self, subject: str, schema: dict[str, Any]) -> dict[str, Any]:
        self._versions(subject)
        return {"is_compatible": self._is_compatible(subject, schema)}

    def by_id(self, number: str) -> dict[str, Any]:
        if not 0 < int(number) <= len(self.schemas):
            raise Fault(_SCHEMA_UNKNOWN, f"Schema {number} not found")
        return dict(self.schemas[int(number) - 1])

    def _versions(self, subject: str) -> list[int]:
        if not self.subjects.get(subject):
            raise Fault(_SUBJECT_UNKNOWN, f"Subject '{subject}' not found.")
        return self.subjects[subject]

    def _number(self, schema: dict[str, Any]) -> int:
        wanted = _essence(schema)
        for number, known in enumerate(self.schemas, 1):
            if _essence(known) == wanted:
                return number
        self.schemas.append(schema)
        return len(self.schemas)

    def _require_sound(self, schema: dict[str, Any]) -> None:
        if schema.get("schemaType", "AVRO") == "AVRO":
            try:
                json.loads(schema["schema"])["type"]
            except (ValueError, KeyError, TypeError):
                raise Fault(_INVALID, "Invalid schema") from None

    def _is_compatible(self, subject: str, schema: dict[str, Any]) -> bool:
        before = self.schemas[self.subjects[subject][-1] - 1]
        if schema.get("schemaType", "AVRO") != before.get("schemaType", "AVRO"):
            return False
        if schema.get("schemaType", "AVRO") != "AVRO":
            return True
        old = {one["name"]: one for one in json.loads(before["schema"])["fields"]}
        return all(
            one["type"] == old[one["name"]]["type"] if one["name"] in old else "default" in one
            for one in json.loads(schema["schema"])["fields"]
        )


def _essence(schema: dict[str, Any]) -> tuple[str, str, str]:
    kind = schema.get("schemaType", "AVRO")
    text = schema["schema"]
    return kind, text, json.dumps(schema.get("references") or [])


@contextmanager
def running_registry(user: str | None = None) -> Iterator[Registry]:
    """`user` is name:password, where the registry asks for one."""
    registry = Registry(user=user)

    class Handler(_Handler):
        served = registry

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Registry
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self._answer(self._got)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(lambda parts: self._posted(parts, body))

    def _got(self, parts: list[str]) -> dict[str, Any]:
        match parts:
            case ["subjects", subject, "versions", "latest"]:
                return self.served.latest(subject)
            case ["subjects", subject, "versions", version]:
                number = self.served.subjects[subject][int(version) - 1]
                schema = {"subject": subject, "id": number, "version": int(version)}
                return schema | self.served.by_id(str(number))
            case ["schemas", "ids", number]:
                return self.served.by_id(number)
        raise Fault(404, "HTTP 404 Not Found")

    def _posted(self, parts: list[str], body: dict[str, Any]) -> dict[str, Any]:
        schema = {key: body[key] for key in ("schema", "schemaType", "references") if body.get(key)}
        match parts:
            case ["subjects", subject, "versions"]:
                return self.served.register(subject, schema)
            case ["subjects", subject]:
                return self.served.look_up(subject, schema)
            case ["compatibility", "subjects", subject, "versions", "latest"]:
                return self.served.try_on(subject, schema)
        raise Fault(404, "HTTP 404 Not Found")

    def _answer(self, ask: Callable[[list[str]], dict[str, Any]]) -> None:
        path = urlsplit(self.path).path
        self.served.requests.append(f"{self.command} {path}")
        try:
            self._require_user()
            status, schema = 200, ask([unquote(part) for part in path.strip("/").split("/")])
        except Fault as fault:
            status, schema = fault.status, {"error_code": fault.code, "message": fault.message}
        content = json.dumps(schema).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _require_user(self) -> None:
        if self.served.is_failing:
            raise Fault(50001, "Error in the backend data store")
        if self.served.user is None:
            return
        wanted = "Basic " + base64.b64encode(self.served.user.encode()).decode()
        if self.headers.get("Authorization") != wanted:
            raise Fault(401, "Unauthorized")

    def log_message(self, *_args: Any) -> None:
        """Requests are noted, not printed."""
