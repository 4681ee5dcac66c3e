"""Kinds of network interfaces on Linux, from /sys/class/net."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec

from muster.facts import InterfaceKind
from muster.probe.reading import number

#: Types of <net/if_arp.h>.
_ETHERNET, _INFINIBAND, _PPP, _LOOPBACK = 1, 32, 512, 772

#: Names by custom, where the kernel does not tell more: what machines and containers make for themselves, and VPNs.
_VIRTUAL = re.compile(
    r"(docker|virbr|veth|vnet|lxc|lxd|podman|cni|cali|flannel|kube|nerdctl|vmnet|vboxnet|dummy|ifb|macvtap|incusbr)"
    r"[\w.-]*|br-[0-9a-f]{12}"
)
_VPN = re.compile(r"(wg|tun|tap|tailscale|zt|utun|ppp|ipsec|nebula|nordlynx|proton|vpn|gpd|cscotun)[\w.-]*")
_WIFI = re.compile(r"(wl|wlan|wifi|ath|ra)\w*\d\w*")
_WIRED = re.compile(r"(eth|en|em|bond|team|ib|p\d)[\w.-]*")
_BRIDGE = re.compile(r"(br|vmbr|lxdbr)\d+")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What /sys says of an interface. `type` is of <net/if_arp.h>, `devtype` of its uevent, `driver` of its device."""

    name: str
    type: int | None = None  #: `None` where /sys does not know it, as in a namespace without a /sys of its own
    devtype: str = ""
    driver: str = ""
    wireless: bool = False
    bridge: bool = False
    tun: bool = False
    members: tuple[str, ...] = ()
    mbps: int | None = None


def read_device(name: str, index: int, root: Path = Path("/sys")) -> Device:
    """Read what /sys has of the interface with this index; another one of the same name is another namespace's."""
    at = root / "class/net" / name
    if _text(at / "ifindex") != str(index):
        return Device(name=name)
    uevent = re.search(r"^DEVTYPE=(\w+)", _text(at / "uevent"), re.MULTILINE)
    speed = number(_text(at / "speed"))
    members: list[str] = []
    with contextlib.suppress(OSError):
        members = sorted(entry.name for entry in (at / "brif").iterdir())
    driver = ""
    with contextlib.suppress(OSError):
        driver = (at / "device/driver").readlink().name
    return Device(
        name=name,
        type=number(_text(at / "type")),
        devtype="" if uevent is None else uevent[1],
        driver=driver,
        wireless=(at / "wireless").exists() or (at / "phy80211").exists(),
        bridge=(at / "bridge").exists(),
        tun=(at / "tun_flags").exists(),
        members=tuple(members),
        mbps=speed if speed is not None and 0 < speed < 2**31 else None,
    )


def kind_of(device: Device) -> InterfaceKind:
    """What an interface is. Pure. A veth that is called eth0 is the one link of a container: Ethernet to it."""
    name = device.name
    if device.type == _LOOPBACK or re.fullmatch(r"lo\d*", name):
        return "loopback"
    if device.driver == "thunderbolt-net" or re.fullmatch(r"thunderbolt\d+|tbt\d+", name):
        return "thunderbolt"
    if device.wireless or device.devtype == "wlan":
        return "wifi"
    if _VIRTUAL.fullmatch(name):
        return "virtual"
    if device.type == _PPP or device.tun or device.devtype == "wireguard" or _VPN.fullmatch(name):
        return "vpn"
    if device.bridge or device.devtype == "bridge":
        return "bridge"
    if device.type in (_ETHERNET, _INFINIBAND):
        return "other" if device.devtype == "wwan" else "ethernet"
    return _by_name(name) if device.type is None else "other"


def _by_name(name: str) -> InterfaceKind:
    if _WIFI.fullmatch(name):
        return "wifi"
    if _BRIDGE.fullmatch(name):
        return "bridge"
    return "ethernet" if _WIRED.fullmatch(name) else "other"


def _text(path: Path) -> str:
    """The file without its end of line; "" where it cannot be read, such as the speed of what is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
