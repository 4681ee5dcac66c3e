"""What workers ask each other, and the coordinator asks workers, on a worker's peer port.

TCP. A message is four bytes of big-endian length and a msgpack map; a request is answered by one reply, after which
either the next request follows on the same connection, or raw bytes where the request says so. The evolution rules
of `muster.events` hold. Whoever speaks first says what it wants; nothing is sent unasked.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from muster.facts import HeldModel
from muster.needs import ModelNeeds
from muster.spec import BootId, Failure, NodeId

#: The longest message, in bytes; what is longer comes as raw bytes behind one.
MAXIMUM_BYTES = 16 * 2**20


class PeerRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what is asked on a peer port."""


class Ping(PeerRequest, frozen=True, kw_only=True, tag="ping"):
    """Answer `Pong`. `node` and `boot` are whom the caller means to reach."""

    node: NodeId
    boot: BootId


class DialBack(PeerRequest, frozen=True, kw_only=True, tag="dial-back"):
    """Ping the caller's peer port `port` at `host`, from the address that this came in at; answer `DialledBack`."""

    node: NodeId
    boot: BootId
    host: str
    port: int


class Burst(PeerRequest, frozen=True, kw_only=True, tag="burst"):
    """Take `upload` raw bytes that follow, or, after `Pong`, send `download` raw bytes; then `Pong`."""

    upload: int = 0
    download: int = 0


class Watch(PeerRequest, frozen=True, kw_only=True, tag="watch"):
    """Answer `Pong`, and keep the connection open until the caller closes it: its end says that the link is gone."""


class InspectModel(PeerRequest, frozen=True, kw_only=True, tag="inspect-model"):
    """What does this model need; answer `Inspected` or `PeerRefused`. Reads config.json and headers.

    Only what is on the node, unless `ask_hub`: then only what the hub says.
    """

    model: str
    revision: str = ""
    ask_hub: bool = False


class ListFiles(PeerRequest, frozen=True, kw_only=True, tag="list-files"):
    """Which files the model in `path` has; answer `Files` or `PeerRefused`. Only what `HeldModel` offers.

    Of the files `digests` the XXH3 is found out where it is not known, which takes as long as reading them.
    """

    path: str
    digests: tuple[str, ...] = ()


class FetchFile(PeerRequest, frozen=True, kw_only=True, tag="fetch-file"):
    """Send a file from byte `offset` on; answer `FileFollows` and then its bytes, or `PeerRefused`."""

    path: str
    name: str
    offset: int = 0


class FollowBlob(PeerRequest, frozen=True, kw_only=True, tag="follow-blob"):
    """Send what is there of a file of the hub id `model` from byte `offset` on, also while it is being downloaded.

    `hash` is the hub's own: SHA-256, or a git blob id. Answer `BlobFollows` and then its bytes, or `PeerRefused`. Where
    there is nothing yet that may still come, the answer takes a few seconds.
    """

    model: str
    hash: str
    offset: int = 0


AnyPeerRequest = Ping | DialBack | Burst | Watch | InspectModel | ListFiles | FetchFile | FollowBlob


class PeerReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what a peer port answers."""


class Pong(PeerReply, frozen=True, kw_only=True, tag="pong"):
    """I am this boot of this node, and see the caller at `seen`."""

    node: NodeId
    boot: BootId
    seen: str = ""


class DialledBack(PeerReply, frozen=True, kw_only=True, tag="dialled-back"):
    """Whether the caller was reached, and why not."""

    reached: bool
    error: str = ""


class Inspected(PeerReply, frozen=True, kw_only=True, tag="inspected"):
    """What the model needs, and whether its files are here."""

    needs: ModelNeeds
    held: HeldModel | None = None


class PeerFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a model: its name relative to the directory, its size, and its XXH3-128 in hex where that is known.

    The hash finds what went wrong on the way and on disks. It is the giver's own word, so that one which withstands
    forgery would not say more.
    """

    name: str
    bytes: int
    xxh3: str = ""


class Files(PeerReply, frozen=True, kw_only=True, tag="files"):
    """The files of a model, by name; `revision` is the hub's commit, where it came from there.

    `identity` is the model's fingerprint (`muster.model.files.fingerprint`), the same of every copy of it, and
    `weights` are the names of all its weight files, those that are not here as well.
    """

    files: tuple[PeerFile, ...]
    revision: str = ""
    identity: str = ""
    weights: tuple[str, ...] = ()


class FileFollows(PeerReply, frozen=True, kw_only=True, tag="file-follows"):
    """`bytes` raw bytes follow: the rest of a file of `size` bytes."""

    bytes: int
    size: int


#: What a node says of a file of which it has no more: "coming" is one that it downloads from the hub, or is about to,
#: whatever others do; "elsewhere" one that the download which goes on there does not bring; "open" anything else.
Prospect = Literal["coming", "elsewhere", "open"]


class BlobFollows(PeerReply, frozen=True, kw_only=True, tag="blob-follows"):
    """`bytes` raw bytes of a file follow, 0 where there is nothing new; `prospect` is of what lies beyond them.

    `moved` is another number whenever the download of that model has moved.
    """

    bytes: int
    prospect: Prospect = "open"
    moved: int = 0


class PeerRefused(PeerReply, frozen=True, kw_only=True, tag="peer-refused"):
    """The request was not carried out."""

    failure: Failure


AnyPeerReply = Pong | DialledBack | Inspected | Files | FileFollows | BlobFollows | PeerRefused
