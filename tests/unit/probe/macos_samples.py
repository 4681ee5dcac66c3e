"""What tools of macOS print, in the form that they print it in; names, addresses and UUIDs are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

UUIDS = [f"{number:08X}-1111-4222-8333-{number:012X}" for number in range(1, 33)]

Bus = dict[str, object]


def computer(name: str, domain: str, model: str = "Mac16,9", *, rdma: bool = True) -> Bus:
    """Another Mac at the end of a cable."""
    services: list[Bus] = [
        {
            "_name": "service_ip",
            "protocol_id_key": 1,
            "protocol_revision_key": 1,
            "protocol_version_key": 1,
            "service_uuid_key": UUIDS[30],
        }
    ]
    if rdma:
        unknown = {"_name": "unknown_xd_service", "protocol_id_key": 64087, "service_uuid_key": UUIDS[31]}
        services.append({**unknown, "protocol_revision_key": 0, "protocol_version_key": 1})
    return {
        "_name": name,
        "device_id_key": "0xA",
        "device_name_key": model,
        "domain_uuid_key": domain,
        "services_title": services,
        "vendor_id_key": "0x0A27",
        "vendor_name_key": "Apple Inc.",
    }


def device(name: str, vendor: str, mode: str, speed: str, behind: Sequence[Bus] = ()) -> Bus:
    """A dock, a display or a disk: it has no domain of its own."""
    found: Bus = {
        "_name": name,
        "device_id_key": "0x501",
        "device_name_key": name,
        "mode_key": mode,
        "receptacle_upstream_ambiguous_tag": {
            "current_speed_key": speed,
            "link_status_key": "0x2",
            "receptacle_status_key": "receptacle_connected",
        },
        "route_string_key": "1",
        "switch_uid_key": "0x3D89123456780100",
        "vendor_name_key": vendor,
    }
    if behind:
        found["_items"] = list(behind)
    return found


def bus(
    number: int,
    receptacle: str,
    speed: str,
    *items: Bus,
    domain: str | None = None,
    machine: str = "Mac Studio",
) -> Bus:
    """One bus of Apple silicon, which has one receptacle."""
    found: Bus = {
        "_name": f"thunderboltusb4_bus_{number}",
        "device_name_key": machine,
        "domain_uuid_key": domain if domain is not None else UUIDS[number],
        "receptacle_1_tag": {
            "current_speed_key": speed,
            "link_status_key": "0x2" if items else "0x100",
            "micro_version_key": "0.0.0",
            "receptacle_id_key": receptacle,
            "receptacle_status_key": "receptacle_connected" if items else "receptacle_no_devices_connected",
        },
        "route_string_key": "0",
        "switch_uid_key": f"0x05AC00000000000{number}",
        "vendor_name_key": "Apple Inc.",
    }
    if items:
        found["_items"] = list(items)
    return found


def thunderbolt(*buses: Mapping[str, object]) -> str:
    """The whole document."""
    return json.dumps({"SPThunderboltDataType": buses}, indent=2)


#: A Mac Studio with Thunderbolt 5 and nothing plugged in, macOS 26.
TB5_IDLE = thunderbolt(*(bus(number, str(number + 1), "Up to 120 Gb/s") for number in (3, 2, 1, 0)))
#: The same on macOS 15, where the speed of a port reads otherwise.
TB5_IDLE_15 = thunderbolt(*(bus(number, str(number + 1), "Up to 80 Gb/s") for number in (0, 1)))
#: A Mac mini with an M4: Thunderbolt 4.
TB4_IDLE = thunderbolt(*(bus(number, str(number + 1), "Up to 40 Gb/s", machine="Mac mini") for number in (2, 1, 0)))
#: Two Macs with one cable: the one's bus 1, receptacle 2, and the other's bus 0, receptacle 1.
CABLED_A = thunderbolt(
    bus(2, "3", "Up to 120 Gb/s", domain=UUIDS[12]),
    bus(1, "2", "80 Gb/s", computer("studio-b", UUIDS[20]), domain=UUIDS[11]),
    bus(0, "1", "Up to 120 Gb/s", domain=UUIDS[10]),
)
CABLED_B = thunderbolt(
    bus(1, "2", "Up to 120 Gb/s", domain=UUIDS[21]),
    bus(0, "1", "80 Gb/s", computer("studio-a", UUIDS[11].lower()), domain=UUIDS[20]),
)
#: A Thunderbolt 5 port with an old dock, one with a display, and one with a Mac behind a dock.
BUSY = thunderbolt(
    bus(0, "1", "40 Gb/s", device("TS4", "CalDigit", "usb_four", "40 Gb/s")),
    bus(1, "2", "40 Gb/s", device("Studio Display", "Apple Inc.", "thunderbolt_three", "40 Gb/s")),
    bus(
        2,
        "3",
        "80 Gb/s",
        device("TS5 Plus", "CalDigit", "usb_four_v2", "80 Gb/s", [computer("mini", UUIDS[25], "Mac16,11")]),
    ),
)
#: Every port of a Mac at something that is slower than itself.
ALL_AT_OLD = thunderbolt(bus(0, "1", "40 Gb/s", device("TS4", "CalDigit", "usb_four", "40 Gb/s")))
#: An Intel Mac: one bus with two receptacles.
INTEL = thunderbolt(
    {
        "_name": "thunderbolt_bus",
        "device_name_key": "MacBook Pro",
        "domain_uuid_key": UUIDS[5],
        "receptacle_1_tag": {
            "current_speed_key": "Up to 40 Gb/s",
            "receptacle_id_key": "1",
            "receptacle_status_key": "receptacle_no_devices_connected",
        },
        "receptacle_2_tag": {
            "current_speed_key": "40 Gb/s",
            "receptacle_id_key": "2",
            "receptacle_status_key": "receptacle_connected",
        },
        "_items": [computer("imac", UUIDS[6], rdma=False)],
    }
)
#: What it prints on a virtual machine, and on a Mac whose ports are switched off.
NO_PORTS = thunderbolt()

HARDWARE_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 02:11:22:33:44:00

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 02:11:22:33:44:10

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 02:11:22:33:44:01

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 02:11:22:33:44:10

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 02:11:22:33:44:14

Hardware Port: Thunderbolt 3
Device: en4
Ethernet Address: 02:11:22:33:44:18

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en9
Ethernet Address: 02:11:22:33:44:19

VLAN Configurations
===================
"""
PORTS = {
    "Ethernet": "en0",
    "Thunderbolt Bridge": "bridge0",
    "Wi-Fi": "en1",
    "Thunderbolt 1": "en2",
    "Thunderbolt 2": "en3",
    "Thunderbolt 3": "en4",
    "Thunderbolt Ethernet Slot 1": "en9",
}


IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
\tnd6 options=201<PERFORMNUD,DAD>
gif0: flags=8010<POINTOPOINT,MULTICAST> mtu 1280
anpi0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 02:11:22:33:44:77
\tmedia: none
\tstatus: inactive
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=567<RXCSUM,TXCSUM,VLAN_MTU,TSO4,TSO6,AV,CHANNEL_IO>
\tether 02:11:22:33:44:00
\tinet6 fe80::1c:aaaa:bbbb:cccc%en0 prefixlen 64 secured scopeid 0xb
\tinet 10.0.1.21 netmask 0xffffff00 broadcast 10.0.1.255
\tmedia: autoselect (10Gbase-T <full-duplex,flow-control>)
\tstatus: active
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 02:11:22:33:44:01
\tinet 10.0.2.33 netmask 0xfffffe00 broadcast 10.0.3.255
\tmedia: autoselect
\tstatus: active
en2: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\toptions=460<TSO4,TSO6,CHANNEL_IO>
\tether 02:11:22:33:44:10
\tmedia: autoselect <full-duplex>
\tstatus: inactive
en3: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 9000
\tether 02:11:22:33:44:14
\tinet6 fe80::347c:94ff:fecd:45c4%en3 prefixlen 64 scopeid 0xd
\tinet 169.254.10.1 netmask 0xffff0000 broadcast 169.254.255.255
\tmedia: autoselect <full-duplex>
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=63<RXCSUM,TXCSUM,TSO4,TSO6>
\tether 02:11:22:33:44:10
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\t\tmaxage 0 holdcnt 0 proto stp maxaddr 100 timeout 1200
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 12 priority 0 path cost 0
\tmember: en4 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 14 priority 0 path cost 0
\tinet 169.254.77.8 netmask 0xffff0000 broadcast 169.254.255.255
\tmedia: <unknown type>
\tstatus: active
bridge100: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500
\tether 02:11:22:33:44:64
\tinet 192.168.64.1 netmask 0xffffff00 broadcast 192.168.64.255
\tmember: vmenet0 flags=10003<LEARNING,DISCOVER,CSUM>
\tstatus: active
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
\tinet 100.101.102.103 --> 100.101.102.103 netmask 0xffffffff
\tinet6 fd7a:115c:a1e0::1 prefixlen 48
en9: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 02:11:22:33:44:19
\tmedia: autoselect (2500Base-T <full-duplex>)
\tstatus: active
"""

IBV_DEVICES_OFF = """    device          \t   node GUID
    ------          \t----------------
"""
IBV_DEVICES = (
    IBV_DEVICES_OFF
    + """    rdma_en2        \t1c5709abcdef0001
    rdma_en3        \t1c5709abcdef0002
"""
)


def ibv_devinfo(name: str, state: str, *gids: str, verbose: bool = True) -> str:
    """One device of `ibv_devinfo -v`, or without `verbose`, of `ibv_devinfo`."""
    lines = [
        f"hca_id:\t{name}",
        "\ttransport:\t\t\tThunderbolt (100)",
        "\tnode_guid:\t\t\t1c57:09ab:cdef:0001",
        "\tvendor_id:\t\t\t0x0000",
        "\tphys_port_cnt:\t\t\t1",
        *(["\tmax_qp:\t\t\t\t10", "\tmax_mr:\t\t\t\t100"] if verbose else []),
        "\t\tport:\t1",
        f"\t\t\tstate:\t\t\t{state}",
        "\t\t\tmax_mtu:\t\t4096 (5)",
        "\t\t\tlink_layer:\t\tThunderbolt",
        *(["\t\t\tgid_tbl_len:\t\t16"] if verbose else []),
        *(f"\t\t\tGID[{number:3}]:\t\t{gid}" for number, gid in enumerate(gids) if verbose),
    ]
    return "\n".join(lines) + "\n\n"


SYSCTL = """machdep.cpu.brand_string: Apple M4 Max
hw.memsize: 137438953472
iogpu.wired_limit_mb: 0
kern.memorystatus_vm_pressure_level: 1
"""
SW_VERS = {
    "15": "ProductName:\t\tmacOS\nProductVersion:\t\t15.7.1\nBuildVersion:\t\t24G231\n",
    "26": "ProductName:\t\tmacOS\nProductVersion:\t\t26.2\nProductVersionExtra:\t(a)\nBuildVersion:\t\t25C56\n",
}
PMSET = """System-wide power settings:
Currently in use:
 standby              0
 Sleep On Power Button 1
 autorestart          0
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd, caffeinate)
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 womp                 1
"""
HARDWARE = json.dumps(
    {
        "SPHardwareDataType": [
            {
                "_name": "hardware_overview",
                "boot_rom_version": "13822.61.10",
                "chip_type": "Apple M4 Max",
                "machine_model": "Mac16,9",
                "machine_name": "Mac Studio",
                "number_processors": "proc 16:12:4:0",
                "physical_memory": "128 GB",
            }
        ]
    }
)
