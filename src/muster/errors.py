"""Every error that muster raises on purpose, each with a kind, a message and a remedy.

A kind is the short name that events, the command line and the documentation use. An error that crosses a
process boundary becomes a `muster.events.Failure` with the same three fields.
"""

from __future__ import annotations

from typing import ClassVar


class MusterError(Exception):
    """Base of every error that muster raises on purpose."""

    #: Short name of the cause, as events and documentation show it.
    kind: ClassVar[str] = "internal"
    #: Whether the same attempt, made again without any change, may succeed.
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, remedy: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field  #: of a request, where the error is about one
        self.remedy = sentence(remedy)

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


def sentence(text: str) -> str:
    """A remedy as it is shown: the text with a capital letter in front and an end behind, whoever wrote it."""
    if not text:
        return ""
    end = "" if text[-1] in ".!?:…)" else "."
    return text[0].upper() + text[1:] + end


class PayloadError(MusterError):
    """A coordination payload that MLX would refuse, misread or hang on."""

    kind = "payload-invalid"


class PortError(MusterError):
    """A port could not be reserved on an address of this node."""

    kind = "port-unavailable"
    retryable = True


class FormationError(MusterError):
    """`mx.distributed.init` failed, or gave a group of the wrong rank or size."""

    kind = "formation-failed"
    retryable = True


class RdmaError(FormationError):
    """An RDMA device or its driver refused, and does so again until somebody does something to the machine."""

    kind = "rdma-unusable"
    retryable = False


class MembershipError(MusterError):
    """The ranks of a formed group do not belong together."""

    kind = "members-differ"


class BackendError(MusterError):
    """The MLX backend that the instance asks for does not exist on this node."""

    kind = "backend-unavailable"


class ModelError(MusterError):
    """The model's files are missing, incomplete or inconsistent."""

    kind = "model-invalid"


class FetchError(MusterError):
    """Files of a model could not be brought to this node now: a connection was cut, silent, or not to be had."""

    kind = "model-unavailable"
    retryable = True


class DiskFullError(MusterError):
    """There is no room for the files of a model."""

    kind = "disk-full"


class ShardingError(MusterError):
    """The model cannot be sharded in the way or to the world size asked for."""

    kind = "sharding-unsupported"


class ScriptError(MusterError):
    """The script cannot be started: missing, unreadable, or not Python."""

    kind = "script-invalid"


class RequestError(MusterError):
    """A request that names something unknown or carries a bad value."""

    kind = "request-invalid"


class ContextError(RequestError):
    """A prompt, or a prompt and the answer asked for, that the model's context cannot hold."""

    kind = "context-exceeded"


class UnknownModelError(RequestError):
    """No instance serves a model of that name."""

    kind = "model-unknown"


class PlacementError(MusterError):
    """No set of live nodes can hold the instance."""

    kind = "placement-refused"


class LogError(MusterError):
    """The event log cannot be read or written."""

    kind = "log-unavailable"
    retryable = True


class FencedError(LogError):
    """Another coordinator has a higher term: this one may not write any more."""

    kind = "fenced"


class QuorumError(LogError):
    """This coordinator cannot reach a second vote, so that another one may have taken over."""

    kind = "no-quorum"


class StandbyError(MusterError):
    """A standby was asked for what only the active coordinator does."""

    kind = "standby"
    retryable = True


class UnreachableError(MusterError):
    """The coordinator does not answer at the address given."""

    kind = "coordinator-unreachable"
    retryable = True


class PeerError(MusterError):
    """Another node's worker cannot be reached on its peer port, or broke off."""

    kind = "peer-unreachable"
    retryable = True


class AnswerLostError(MusterError):
    """A model's answer had begun, and the coordinator that passed it on is gone."""

    kind = "answer-lost"
    retryable = True


class ProtocolError(MusterError):
    """A peer sent bytes that are not a message of this protocol."""

    kind = "protocol-violation"


class ScopeError(MusterError):
    """The coordination file cannot be put in place, or its directory is not private."""

    kind = "scope-unavailable"


class ScopeWriteError(ScopeError):
    """The coordination file cannot be written: a full disk may have room again, and another node may have it now."""

    retryable = True


class LockError(MusterError):
    """Another process owns what this one wants for itself."""

    kind = "in-use"
