"""What an error text of MLX, JACCL or the RDMA driver means, and what helps. A table; nothing here touches a system.

MLX prints errnos as numbers, which macOS and Linux count differently: 61 is "connection refused" on one and "no data"
on the other. JACCL exists on macOS alone, so that its errnos are always those of macOS.

Source: the texts are those of `mlx/distributed/ring/ring.cpp`, `mlx/distributed/utils.cpp` and, below
`mlx/distributed/jaccl/lib/jaccl/`, `jaccl.cpp`, `rdma.cpp`, `tcp.cpp`, `mesh.cpp` and `ring.cpp`; the meanings are from
the issues of mlx that `Entry.source` names by number.
"""

from __future__ import annotations

import re
import signal
from typing import Final

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One kind of error: a pattern of its text, what it means, and what helps.

    `lasting`: trying again cannot help before somebody does something to the machine. `echo`: the reason is another
    rank's more often than not, which ended or is late.
    """

    pattern: str
    cause: str
    remedy: str
    lasting: bool = False
    echo: bool = False
    source: str = ""


_TIMED_OUT: Final = "60|110"
_UNREACHABLE: Final = "65|113|51|101"
_ADDRESS_IN_USE: Final = "48|98"
_ADDRESS_NOT_AVAILABLE: Final = "49|99"
_NOT_PERMITTED: Final = "13|1"

#: First match wins: what is special stands before what is general.
REMEDIES: Final = (
    # --- sockets: the ring, and JACCL's side channel ---
    Entry(
        rf"Couldn't connect.*error: ({_UNREACHABLE})\b",
        "the address of the neighbour (or of jaccl's rank 0) cannot be reached from this node",
        "look at firewalls and, on macOS, at Privacy & Security > Local Network; see: muster links --measure",
        source="3755",
    ),
    Entry(
        rf"Couldn't connect.*error: ({_TIMED_OUT})\b",
        "the neighbour (or jaccl's rank 0) did not answer: it did not take the connection, nor refuse it",
        "look at firewalls between the nodes, and at why that rank did not start",
        source="3755",
    ),
    Entry(
        r"Couldn't connect",
        "the neighbour (or jaccl's rank 0) did not take the connection",
        "look at why that rank did not start, at firewalls, and for a stranger on its port",
    ),
    Entry(
        r"Accept failed \(error: 4\)",
        "interrupted by a signal while waiting for the left neighbour",
        "look at why the left neighbour did not dial",
    ),
    Entry(
        r"Accept failed \(error: (24|23)\)|Couldn't create socket.*error: (24|23)\b",
        "the process has no file descriptor left",
        "raise the limit of open files (ulimit -n) for the worker",
    ),
    Entry(
        rf"Couldn't (bind|listen).*error: ({_ADDRESS_IN_USE})\b",
        "the port is taken by another process",
        "end that process, or start another attempt: it reserves other ports",
    ),
    Entry(
        rf"Couldn't (bind|listen).*error: ({_ADDRESS_NOT_AVAILABLE})\b",
        "the rank's own address is not an address of this node (any more)",
        "restart the worker so that it reports its present addresses",
    ),
    Entry(rf"Couldn't (bind|listen).*error: ({_NOT_PERMITTED})\b", "not permitted to listen", "use a port above 1023"),
    Entry(
        r"Can't parse address|No usable addresses",
        "an address of the payload has no IPv4 address on this node",
        "use IPv4 addresses",
    ),
    # --- the coordination file and the variables ---
    Entry(
        r"json|parse_error",
        "the coordination file could not be read",
        "see that nothing removes files from the scope's directory",
    ),
    Entry(
        r"\[(ring|jaccl)\] You need to provide via environment variables",
        "MLX did not find its variables",
        "let nothing else change MLX_* or JACCL_* variables while a group forms",
    ),
    Entry(
        r"as many connections to the left as",
        "the hostfile lists more addresses for one rank than for another",
        "list equally many addresses for every rank",
    ),
    Entry(
        r"device file should|Device names should be|full connectivity matrix",
        "the device file is no square matrix of device names",
        "write one row per rank and one entry per rank in it: null, a name, or a list of names",
    ),
    Entry(
        r"valid mesh or a valid ring|do not form a valid (mesh|ring)",
        "the device matrix is neither a mesh nor a ring",
        "check the Thunderbolt cables and `ibv_devices` on every node",
    ),
    Entry(
        r"mesh supports up to|per direction supported",
        "the device matrix is larger than what JACCL holds: 8 ranks in a mesh, 4 wires to a neighbour in a ring",
        "use fewer ranks or wires, or prefer the ring",
    ),
    Entry(
        r"only supported (to|from) direct neighbors",
        "a ring carries messages between direct neighbours alone",
        "use a workload that sends to its neighbours, or a mesh",
    ),
    # --- RDMA devices ---
    Entry(
        r"(Could not|Couldn't) find device",
        "the RDMA device that the matrix names is not there: names change when a machine starts or is cabled anew",
        "create the instance again, so that the matrix is built from what `ibv_devices` lists now",
        lasting=True,
        source="3777",
    ),
    Entry(
        r"(Could not|Couldn't) open device",
        "the RDMA device cannot be opened: it is not there, or RDMA is disabled",
        "run `rdma_ctl status` and `ibv_devices` on that node; RDMA is enabled from Recovery with: rdma_ctl enable",
        lasting=True,
        source="3777",
    ),
    Entry(
        r"No IPv4-mapped GID",
        "the Thunderbolt port has no IPv4 address, so that its RDMA device has no usable address",
        "give the interface an IPv4 address, such as a link-local one; macOS takes minutes to do so by itself",
        source="4191, 3467",
    ),
    Entry(
        r"RTR failed with errno 22\b",
        "the RDMA device has no usable address: the Thunderbolt bridge is active or the port has no IPv4 address",
        "remove the interface from the Thunderbolt bridge and give it an IPv4 address of its own",
        source="3467, 3207",
    ),
    Entry(
        r"[Cc]reat(e|ing) (the )?queue pair( failed with errno 16\b)?",
        "the RDMA device has no queue pair left: it has 10, and a crash may have left some behind",
        "delete other jaccl instances on that node, or else reboot it; trying again does not help",
        lasting=True,
        source="4209, 3162",
    ),
    Entry(
        r"failed with errno 16\b",
        "the RDMA device is busy: its queue pairs are used up, or a crash left them behind",
        "reboot that node; trying again does not help",
        lasting=True,
        source="3207, 4209",
    ),
    Entry(
        r"queue pair to \w+ failed with errno 60\b",
        "the RDMA connection timed out: it was routed over the wrong interface",
        "check which Thunderbolt port the device matrix names for this pair",
        source="3467",
    ),
    Entry(
        r"failed with errno 96\b",
        "the RDMA device lost its addresses, as after a long idle time",
        "unplug and replug the cable, or reboot that node",
        lasting=True,
        source="3467",
    ),
    Entry(
        r"queue pair to \w+ failed with errno",
        "the RDMA device did not accept the connection",
        "check with `ibv_devinfo` that both ports are active, and that both machines run the same macOS",
        source="3467",
    ),
    Entry(
        r"allocate protection domain",
        "the RDMA device has no protection domain left",
        "reboot that node: too many groups were formed since it started",
        lasting=True,
        source="3207",
    ),
    Entry(
        r"create completion queue",
        "the RDMA device has no completion queue left",
        "reboot that node: crashes or too many groups have used them up",
        lasting=True,
        source="3162",
    ),
    Entry(
        r"[Rr]egister memory region",
        "the RDMA device cannot register more memory: it holds about 100 regions, and one group takes most of them",
        "delete the other jaccl instance that uses the same cable; where there is none, reboot that node",
        lasting=True,
        source="3162",
    ),
    # --- a group that was formed ---
    Entry(
        r"\[jaccl\].*(Recv|Send) failed with (errno=|error code )",
        "the connection between the ranks broke: a rank ended, or the cable lost its link",
        "look at that rank's log, and at the cable; where it comes again at once, reboot both nodes",
        echo=True,
        source="3910, 4192",
    ),
    Entry(
        r"peer closed the side channel|connection to a peer was lost|[Rr]ecv failed|[Ss]end failed",
        "a neighbour's process ended, or a stranger had taken its place",
        "look at that rank's log",
        echo=True,
    ),
    Entry(
        r"GPU Timeout",
        "the GPU waited too long for a message of another rank",
        "let the communication run on the CPU's stream (stream=mx.cpu)",
        echo=True,
        source="3207",
    ),
    Entry(
        r"Cannot initialize (\w+ )?distributed backend|Couldn't initialize any backend|no jaccl backend",
        "this MLX has no such backend, or the machine lacks what it needs",
        "jaccl needs macOS 26.2 or newer, Thunderbolt 5 and RDMA enabled; use the ring elsewhere",
        lasting=True,
    ),
)


#: By what a text is known to be MLX's, of a group.
_MARK: Final = re.compile(r"\[(ring|jaccl|distributed)\]|connection to a peer was lost")


def explain(text: str) -> Entry | None:
    """What is known of an error text; `None` where nothing is."""
    return next((one for one in REMEDIES if re.search(one.pattern, text, re.DOTALL)), None)


def explain_later(text: str, *, ranks: int) -> Entry | None:
    """`explain`, for a text of a rank that may be anybody's: only what MLX says of a group of `ranks` is looked up."""
    waited = ranks > 1 and "GPU Timeout" in text
    return explain(text) if waited or _MARK.search(text) else None


def translate(text: str) -> tuple[str, str]:
    """Cause and remedy of an error text; the text itself and a hint when it is unknown."""
    found = explain(text)
    return (text, "look at the logs of the other ranks") if found is None else (found.cause, found.remedy)


def explain_signal(number: int, *, backend: str) -> Entry | None:
    """What it means that a rank of such a group was ended by this signal; `None` where it says nothing special.

    A crash inside the RDMA driver takes the process with it and leaves no text.
    """
    if backend != "jaccl" or number not in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        return None
    return Entry(
        pattern="",
        cause="a crash inside JACCL: the cable was unplugged, or the RDMA device is gone",
        remedy="check the Thunderbolt cable and `ibv_devices` on this node and its neighbours",
        source="3777, 4192, 4319, 4485",
    )
