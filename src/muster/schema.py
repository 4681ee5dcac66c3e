"""JSON Schema of every message, and which socket it travels on, for peers in other languages."""

from __future__ import annotations

from typing import cast

import msgspec

import muster
from muster.bus.endpoints import DEFAULT_CONTROL_PORT
from muster.events import Envelope, Event
from muster.group.shapes import Payload
from muster.peer_protocol import AnyPeerReply, AnyPeerRequest
from muster.protocol import AnyRequest, Call
from muster.rank_protocol import AnyStep, FromRank, JoinSteps, Pieces, ToRank, ToRunner
from muster.replies import TOPIC_BEAT, TOPIC_EVENT, Answer, AnyReply, Pulse
from muster.spec import InstanceSpec
from muster.state import State

_Json = dict[str, object]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PREFIX = "#/$defs/"

_DESCRIPTION = (
    "Messages are msgpack. A schema describes the message as it is after decoding: a Struct is a map with the names of"
    ' its fields as keys. Where a schema says contentEncoding "base64", the msgpack value is of type bin.'
    " A tag, in `type`, keeps its meaning; new fields have defaults; no field changes its type."
    " Skip fields and tags that you do not know."
)

_ONE_FRAME = "ZeroMQ message of one frame"

#: Unions and lists, by the name that they have in the schema.
UNIONS: dict[str, object] = {
    "Event": Event,
    "Request": AnyRequest,
    "Reply": AnyReply,
    "ToRunner": ToRunner,
    "Pieces": Pieces,
    "AnyStep": AnyStep,
    "ToRank": ToRank,
    "FromRank": FromRank,
    "Payload": Payload,
    "PeerRequest": AnyPeerRequest,
    "PeerReply": AnyPeerReply,
}

#: Messages that are one Struct.
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Envelope,
    State,
    Call,
    Answer,
    Pulse,
    JoinSteps,
    InstanceSpec,
)

#: What the fields hold that are encoded apart and put into their message as they are, by Struct and field.
EMBEDDED: dict[tuple[str, str], str] = {
    ("Envelope", "body"): "Event",
    ("Report", "event"): "Event",
    ("Welcome", "state"): "State",
    ("Snapshot", "state"): "State",
}

#: Fields of bytes, or of lists of bytes, that are whole messages in msgpack.
ENCODED: dict[tuple[str, str], str] = {
    ("Replayed", "envelopes"): "Envelope",
    ("Found", "envelopes"): "Envelope",
    ("Form", "payload"): "Payload",
}


def schema() -> _Json:
    """The JSON Schema: `$defs` has every message, `sockets` says where it travels.

    The document itself validates an `Envelope`.
    """
    schemas, components = msgspec.json.schema_components((*UNIONS.values(), *STRUCTS), ref_template=_PREFIX + "{name}")
    definitions = dict(cast("dict[str, _Json]", components))
    for name, union in zip(UNIONS, schemas, strict=False):
        definitions[name] = union
    for (owner, field), name in EMBEDDED.items():
        _properties(definitions, owner)[field] = _reference(name)
    for (owner, field), name in ENCODED.items():
        _describe_bytes(_properties(definitions, owner)[field], _reference(name))
    return {
        "$schema": _DIALECT,
        "title": "muster",
        "description": _DESCRIPTION,
        "version": muster.__version__,
        **_reference("Envelope"),
        "sockets": _sockets(),
        "$defs": dict(sorted(definitions.items())),
    }


def _reference(name: str) -> _Json:
    return {"$ref": _PREFIX + name}


def _properties(definitions: dict[str, _Json], owner: str) -> dict[str, _Json]:
    return cast("dict[str, _Json]", definitions[owner]["properties"])


def _describe_bytes(node: object, reference: _Json) -> None:
    """Say of every text of bytes within `node` what it holds."""
    if isinstance(node, list):
        for item in cast("list[object]", node):
            _describe_bytes(item, reference)
    elif isinstance(node, dict):
        described = cast("_Json", node)
        for item in list(described.values()):
            _describe_bytes(item, reference)
        if "contentEncoding" in described:
            described.update(contentMediaType="application/vnd.msgpack", contentSchema=reference)


def _sockets() -> list[_Json]:
    """Every socket, with the frames of each message in each direction."""
    return [
        _socket(
            "control",
            binds=f"coordinator, ROUTER, TCP port {DEFAULT_CONTROL_PORT} unless configured",
            connects="worker or client, DEALER",
            framing=_ONE_FRAME,
            notes="An Answer has the id of its Call; the last one has `last` set. Begin with a Hello.",
            messages=[_message("to coordinator", "Call"), _message("from coordinator", "Answer")],
        ),
        _socket(
            "events",
            binds="coordinator, XPUB, TCP port `events_port` of Welcome",
            connects="worker or observer, SUB",
            framing="ZeroMQ message of two or three frames: topic, msgpack, and often the coordinator's boot, UTF-8",
            notes="Subscribe first, then say Hello on control, then apply what is newer than the state of Welcome."
            " After a gap in `sequence`, or a Pulse whose `head` is ahead, ask control for a Replay.",
            messages=[
                _message("from coordinator", "Envelope", topic=TOPIC_EVENT),
                _message("from coordinator", "Pulse", topic=TOPIC_BEAT),
            ],
        ),
        _socket(
            "generation",
            binds="coordinator, ROUTER, TCP port `generation_port` of Welcome",
            connects='runner of rank 0, DEALER with the identity "<instance>/<attempt>"',
            framing=_ONE_FRAME,
            notes="The runner only dials: the coordinator addresses it by its identity.",
            messages=[_message("to coordinator", "Pieces"), _message("from coordinator", "ToRunner")],
        ),
        _socket(
            "steps",
            binds="runner of rank 0, ROUTER, at `steps` of its RankPrepared",
            connects="runners of the other ranks, DEALER",
            framing=_ONE_FRAME,
            notes="Every rank joins first. Steps have no gaps and come in the order of `step`.",
            messages=[_message("to rank 0", "JoinSteps"), _message("from rank 0", "AnyStep")],
        ),
        _socket(
            "peer",
            binds="worker, TCP, `peer_port` of its NodeInfo, on every address",
            connects="another worker, or the coordinator",
            framing="4 bytes of length, big-endian, then msgpack; raw bytes follow where a message says so",
            notes="Nothing is sent unasked; one reply for each request.",
            messages=[_message("to worker", "PeerRequest"), _message("from worker", "PeerReply")],
        ),
        _socket(
            "runner",
            binds="worker, a Unix socket pair that the runner inherits",
            connects="runner",
            framing="4 bytes of length, big-endian, then msgpack",
            notes="Private to one version of muster.",
            messages=[_message("to runner", "ToRank"), _message("from runner", "FromRank")],
        ),
    ]


def _socket(name: str, *, binds: str, connects: str, framing: str, notes: str, messages: list[_Json]) -> _Json:
    return {
        "name": name,
        "binds": binds,
        "connects": connects,
        "framing": framing,
        "notes": notes,
        "messages": messages,
    }


def _message(direction: str, name: str, *, topic: bytes | None = None) -> _Json:
    return {"direction": direction, **({"topic": topic.decode()} if topic else {}), "message": _reference(name)}
