"""The receiver's API as an OpenAPI document: what a service must implement for `Http`."""

from __future__ import annotations

from typing import Any

from epochal.receiver.transactions import ARROW, NDJSON, State

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_OWNER = {"pipeline": _TEXT, "sink": _TEXT, "run": {"type": ["string", "null"]}}
_TXNS = {"type": "array", "items": _TEXT}
_CLIENT = {
    **_OWNER,
    "claims": {
        "type": "array",
        "items": _TEXT,
        "description": "under which the client's epoch log decided the epoch: once a transaction "
        "of another claim is committed, those of these are `taken`",
    },
}


def _object(properties: dict[str, Any], *, required: list[str] | None = None) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed}


_SCHEMAS: dict[str, Any] = {
    "Transaction": _object(
        {
            "txn": _TEXT,
            "state": {"enum": [state.value for state in State]},
            "rows": _COUNT,
            "age_s": {"type": "number"},
        }
    ),
    "Transactions": _object(
        {
            "transactions": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/Transaction"},
            },
            "next": {"type": ["string", "null"], "description": "`after` of the next request"},
        }
    ),
    "About": _object(
        {
            "protocol": _TEXT,
            "version": _COUNT,
            "formats": {"type": "array", "items": _TEXT},
            "body_bytes_max": _COUNT,
            "rehearses": {"type": "boolean"},
            "counts": {"type": "boolean", "description": "whether GET /counts can be asked"},
        },
        required=["protocol", "version", "formats", "body_bytes_max", "rehearses"],
    ),
    "Error": _object(
        {"error": _TEXT, "state": {"enum": [state.value for state in State]}}, required=["error"]
    ),
    "Owner": _object(_CLIENT, required=["pipeline", "sink"]),
    "Rehearsal": _object({**_OWNER, "txns": _TXNS}, required=["pipeline", "sink", "txns"]),
    "Rehearsed": _object({"rehearsed": _COUNT}),
    "Mark": _object(
        {**_CLIENT, "uid": _TEXT, "tag": _TEXT, "epoch": _COUNT, "txns": _TXNS},
        required=["pipeline", "sink", "uid", "tag", "epoch", "txns"],
    ),
    "Marked": _object({"uid": _TEXT, "epoch": _COUNT}),
    "Marks": _object(
        {
            "marks": {
                "type": "array",
                "items": _object({"uid": _TEXT, "epoch": _COUNT, "run": _OWNER["run"]}),
            }
        }
    ),
    "Forgotten": _object({"settled_below": _COUNT}),
    "Rows": _object(
        {
            "rows": {
                "type": "array",
                "items": _object(
                    {"seq": _COUNT, **_OWNER, "epoch": _COUNT, "txn": _TEXT, "row": {}}
                ),
            },
            "next": {"type": ["integer", "null"]},
        }
    ),
    "Counts": _object(
        {"epochs": {"type": "array", "items": _object({"epoch": _COUNT, "rows": _COUNT})}}
    ),
    "Health": _object({"status": _TEXT}),
}

_TXN = {"name": "txn", "in": "path", "required": True, "schema": _TEXT}
_REFUSALS = {
    "400": "the request can't be read",
    "401": "no bearer token, or not the right one",
    "404": "no such transaction, by its `state`",
    "409": "the transaction is in another state: see `state`",
    "410": "its epoch is settled and forgotten",
    "413": "the body is too large: send more parts",
    "415": "not one of the formats",
    "422": "these rows will never be taken as they are",
    "503": "nothing happened: try again later",
}


def _query(name: str, schema: dict[str, Any], description: str, *, required: bool = False) -> Any:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "schema": schema,
        "description": description,
    }


def _verb(
    summary: str,
    answer: str,
    *,
    refusals: tuple[str, ...] = (),
    parameters: tuple[Any, ...] = (),
    body: dict[str, Any] | None = None,
    is_open: bool = False,
) -> dict[str, Any]:
    refused = () if is_open else ("401", *refusals, "503")
    verb: dict[str, Any] = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {
            "200": {"description": "done, or done before", "content": _json(answer)},
            **{
                status: {"description": _REFUSALS[status], "content": _json("Error")}
                for status in refused
            },
        },
    }
    if body is not None:
        verb["requestBody"] = {"required": True, "content": body}
    return verb | ({"security": []} if is_open else {})


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _paths() -> dict[str, Any]:
    page = (_query("limit", _COUNT, "at most so many"),)
    rows = {NDJSON: {"schema": _TEXT}, ARROW: {"schema": {"type": "string", "format": "binary"}}}
    owner = (
        _query("uid", _TEXT, "of this uid", required=True),
        _query("tag", _TEXT, "", required=True),
    )
    return {
        "/": {"get": _verb("What this receiver can do", "About")},
        "/health": {"get": _verb("Does it run?", "Health", is_open=True)},
        "/prepare/{txn}": {
            "post": _verb(
                "Keep rows, durable and invisible: whole; or one `part`; or, with `parts` and no "
                "body, all parts are there",
                "Transaction",
                refusals=("400", "409", "410", "413", "415", "422"),
                parameters=(
                    _TXN,
                    _query("part", _COUNT, "which part this is, from 0"),
                    _query("parts", _COUNT, "how many parts there are: seals"),
                ),
                body=rows,
            )
        },
        "/rehearse": {
            "post": _verb(
                "Apply these transactions and take them back: shows that they can be committed",
                "Rehearsed",
                refusals=("400", "404", "409", "410", "422"),
                body=_json("Rehearsal"),
            )
        },
        "/commit/{txn}": {
            "post": _verb(
                "Make a prepared transaction visible; may be repeated",
                "Transaction",
                refusals=("400", "404", "409", "410"),
                parameters=(_TXN,),
                body=_json("Owner"),
            )
        },
        "/abort/{txn}": {
            "post": _verb(
                "Abort a transaction for good; may be repeated",
                "Transaction",
                refusals=("400", "409"),
                parameters=(_TXN,),
            )
        },
        "/transactions": {
            "get": _verb(
                "What is open or prepared, by name",
                "Transactions",
                refusals=("400",),
                parameters=(
                    _query("prefix", _TEXT, "the beginning of names"),
                    _query("after", _TEXT, "names after this one"),
                    *page,
                ),
            )
        },
        "/transactions/{txn}": {
            "get": _verb(
                "The state of a transaction",
                "Transaction",
                refusals=("400", "404", "410"),
                parameters=(_TXN,),
            )
        },
        "/marks": {
            "post": _verb(
                "An epoch is whole: these transactions are committed, and no others",
                "Marked",
                refusals=("400", "409", "410"),
                body=_json("Mark"),
            ),
            "get": _verb(
                "The newest whole epoch per uid of a pipeline's sink",
                "Marks",
                refusals=("400",),
                parameters=(
                    _query("pipeline", _TEXT, "", required=True),
                    _query("sink", _TEXT, "", required=True),
                ),
            ),
            "delete": _verb(
                "Forget proofs of settled epochs; the newest stays",
                "Forgotten",
                refusals=("400",),
                parameters=(*owner, _query("below", _COUNT, "", required=True)),
            ),
        },
        "/rows": {
            "get": _verb(
                "Visible rows, in the order in which they became so",
                "Rows",
                refusals=("400",),
                parameters=(
                    _query("after", _COUNT, "rows after this `seq`"),
                    _query("whole", {"type": "boolean"}, "of whole epochs only"),
                    _query("pipeline", _TEXT, "of this pipeline only"),
                    _query("sink", _TEXT, "of this sink only"),
                    *page,
                ),
            )
        },
        "/counts": {
            "get": _verb(
                "How many rows of each epoch are visible, of one uid and sink",
                "Counts",
                refusals=("400",),
                parameters=owner,
            )
        },
    }


def document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "epochal receiver",
            "version": "1",
            "description": "Two-phase commit over HTTP. Every verb may be repeated.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}],
        "paths": _paths(),
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
