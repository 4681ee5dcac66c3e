"""The schema that `muster schema` prints."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from muster import protocol, rank_protocol, replies
from muster.events import EVENT_TYPES
from muster.schema import EMBEDDED, ENCODED, STRUCTS, UNIONS, schema


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every Struct that can be reached from a message, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    todo: list[Any] = [*UNIONS.values(), *STRUCTS]
    while todo:
        kind = todo.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if found.get(kind.__name__) is not kind:
                found[kind.__name__] = kind
                todo += get_type_hints(kind).values()
        elif get_origin(kind) is not None or isinstance(kind, types.UnionType | type(Union[int, str])):  # noqa: UP007
            todo += get_args(kind)
    return found


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def definitions() -> dict[str, Any]:
    found: Any = schema()["$defs"]
    return found


def test_is_json_and_every_reference_leads_somewhere() -> None:
    document = json.loads(json.dumps(schema()))
    names = set(references(document))
    assert len(names) > 60
    assert {name.removeprefix("#/$defs/") for name in names} <= document["$defs"].keys()


def test_has_every_event_with_its_tag() -> None:
    found = definitions()
    assert len(found["Event"]["anyOf"]) == len(EVENT_TYPES)
    for kind in EVENT_TYPES:
        assert found[kind.__name__]["properties"]["type"] == {"enum": [kind.__struct_config__.tag]}
        assert {"$ref": f"#/$defs/{kind.__name__}"} in found["Event"]["anyOf"]


def test_has_every_struct_of_the_protocol() -> None:
    items = [*vars(protocol).values(), *vars(replies).values(), *vars(rank_protocol).values()]
    known = [item for item in items if isinstance(item, type) and issubclass(item, msgspec.Struct)]
    abstract = {protocol.Request, replies.Reply}
    missing = {kind.__name__ for kind in known if kind not in abstract} - definitions().keys()
    assert missing == set()


def test_structs_have_names_of_their_own() -> None:
    assert not [name for name in definitions() if "." in name or "_" in name]
    assert structs().keys() | UNIONS.keys() | {"Phase"} == definitions().keys()


def test_embedded_messages_are_described_as_what_they_are() -> None:
    raw: set[tuple[str, str]] = set()
    packed: set[tuple[str, str]] = set()
    for name, kind in structs().items():
        for field in msgspec.structs.fields(kind):
            arguments = (field.type, *get_args(field.type))
            if msgspec.Raw in arguments:
                raw.add((name, field.name))
            elif bytes in arguments:
                packed.add((name, field.name))
    packed.remove(("TokenLogprob", "data"))  # the bytes of a character, and no message
    # What jaccl ranks exchange is MLX's own.
    packed -= {("Gather", "data"), ("Gathered", "parts"), ("GatherFrame", "data"), ("GatheredFrame", "parts")}
    assert (raw, packed) == (set(EMBEDDED), set(ENCODED))
    found = definitions()
    assert found["Envelope"]["properties"]["body"] == {"$ref": "#/$defs/Event"}
    payload, null = found["Form"]["properties"]["payload"]["anyOf"]
    assert (payload["contentSchema"], null) == ({"$ref": "#/$defs/Payload"}, {"type": "null"})
    items = found["Replayed"]["properties"]["envelopes"]["items"]
    assert items["contentSchema"] == {"$ref": "#/$defs/Envelope"}


def test_every_message_has_a_socket() -> None:
    sockets: Any = schema()["sockets"]
    carried = {message["message"]["$ref"].removeprefix("#/$defs/") for item in sockets for message in item["messages"]}
    within = {"Event", "Request", "Reply", "Payload", "State", "InstanceSpec"}
    assert carried | within == UNIONS.keys() | {kind.__name__ for kind in STRUCTS}
    assert [item["name"] for item in sockets] == ["control", "events", "generation", "steps", "peer", "runner"]
