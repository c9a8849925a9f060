"""The wire's version says which messages a process understands, so it changes whenever they do."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from asyncrl.stream import codec
from asyncrl.stream.messages import Header

DIGESTS = {2: "3f257e1785054bcc", 3: "cc36620903f89ab4", 4: "aa03053802ed926d"}
"""Of the schema at each wire version that was ever used; a version is never pinned anew."""


def without_prose(schema: Any) -> Any:
    """A JSON schema without its docstrings."""
    if isinstance(schema, dict):
        prose = {"description", "title"} if "properties" in schema or "enum" in schema else set()
        return {key: without_prose(value) for key, value in schema.items() if key not in prose}
    return [without_prose(value) for value in schema] if isinstance(schema, list) else schema


def digest_of_the_wire() -> str:
    """Every message's name, fields, types and defaults, and the arrays behind the header."""
    wire = [without_prose(msgspec.json.schema(Header)), codec._GROUP_DTYPES, codec._TOKEN_ARRAYS]
    return hashlib.sha256(json.dumps(wire, sort_keys=True).encode()).hexdigest()[:16]


def test_the_messages_are_those_of_this_wire_version():
    # Mutations: add a field to a message, rename one, change a type or a default, send an array in another dtype.
    digest = digest_of_the_wire()
    assert DIGESTS.get(codec.WIRE_VERSION) == digest, (
        f"the wire has changed: raise WIRE_VERSION and pin {digest!r} here, unless no run has used this version yet"
    )


def test_docstrings_are_no_part_of_the_wire():
    # Mutation: keep them in the digest.
    assert "kind" in json.dumps(without_prose(msgspec.json.schema(Header)))
    assert "First word of a rollout server" not in json.dumps(without_prose(msgspec.json.schema(Header)))
