"""Linux: what /proc, /sys and nvidia-smi say."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.facts import Gpu, InterfaceKind, RdmaDevice
from muster.probe.linux_buses import read_infiniband, read_thunderbolt
from muster.probe.linux_network import Device, kind_of, read_device
from muster.probe.linux_system import (
    blas_of,
    parse_cpuinfo,
    parse_nvidia_smi,
    parse_os_release,
    parse_pressure,
    parse_ufw,
    pressure_of,
)
from muster.probe.reading import Unread

HOST = "8b9c1030-0000-0000-ffff-000000000001"
PEER = "8b9c1030-0000-0000-ffff-000000000002"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        (Device(name="lo", type=772), "loopback"),
        (Device(name="eth0", type=1, driver="virtio_net"), "ethernet"),
        (Device(name="enp5s0f1", type=1, driver="ixgbe"), "ethernet"),
        (Device(name="eth0", type=1), "ethernet"),  # a veth in a container
        (Device(name="veth12ab", type=1), "virtual"),
        (Device(name="docker0", type=1, devtype="bridge", bridge=True), "virtual"),
        (Device(name="br-0123456789ab", type=1, bridge=True), "virtual"),
        (Device(name="virbr0", type=1, bridge=True), "virtual"),
        (Device(name="br0", type=1, devtype="bridge", bridge=True, members=("eth0",)), "bridge"),
        (Device(name="wlp3s0", type=1, wireless=True), "wifi"),
        (Device(name="wlan0", type=1, devtype="wlan"), "wifi"),
        (Device(name="wg0", type=65534, devtype="wireguard"), "vpn"),
        (Device(name="office", type=65534, devtype="wireguard"), "vpn"),
        (Device(name="tailscale0", type=65534, tun=True), "vpn"),
        (Device(name="corp", type=65534, tun=True), "vpn"),
        (Device(name="zt7nnig34a", type=1, tun=True), "vpn"),
        (Device(name="ppp0", type=512), "vpn"),
        (Device(name="vnet3", type=1, tun=True), "virtual"),
        (Device(name="thunderbolt0", type=1, driver="thunderbolt-net"), "thunderbolt"),
        (Device(name="tb-left", type=1, driver="thunderbolt-net"), "thunderbolt"),
        (Device(name="bond0", type=1, devtype="bond"), "ethernet"),
        (Device(name="eth0.100", type=1, devtype="vlan"), "ethernet"),
        (Device(name="ib0", type=32), "ethernet"),
        (Device(name="wwan0", type=1, devtype="wwan"), "other"),
        (Device(name="sit0", type=776), "other"),
        (Device(name="eth0"), "ethernet"),  # a namespace that has no /sys of its own
        (Device(name="wlan0"), "wifi"),
        (Device(name="lo"), "loopback"),
        (Device(name="br0"), "bridge"),
        (Device(name="mystery"), "other"),
    ],
)
def test_kinds_of_interfaces(device: Device, kind: InterfaceKind) -> None:
    assert kind_of(device) == kind


def test_a_device_is_read_from_sys_unless_it_is_another_namespaces(tmp_path: Path) -> None:
    write(
        tmp_path / "class/net/br0",
        {"ifindex": "7", "type": "1", "speed": "10000", "uevent": "DEVTYPE=bridge\nINTERFACE=br0", "bridge/x": ""},
    )
    write(tmp_path / "class/net/br0/brif", {"eth1/port": "", "eth0/port": ""})
    found = read_device("br0", 7, tmp_path)
    assert found == Device(name="br0", type=1, devtype="bridge", bridge=True, members=("eth0", "eth1"), mbps=10_000)
    assert read_device("br0", 8, tmp_path) == Device(name="br0")
    assert read_device("eth9", 1, tmp_path) == Device(name="eth9")


@pytest.mark.parametrize("speed", ["-1", "4294967295", "", "unknown"])
def test_a_speed_that_is_none_is_not_taken_for_one(tmp_path: Path, speed: str) -> None:
    write(tmp_path / "class/net/eth0", {"ifindex": "2", "type": "1", "speed": speed})
    assert read_device("eth0", 2, tmp_path).mbps is None


def test_a_driver_is_the_end_of_a_link(tmp_path: Path) -> None:
    write(tmp_path / "class/net/tb", {"ifindex": "3", "type": "1", "device/x": ""})
    (tmp_path / "class/net/tb/device/driver").symlink_to("../../../../bus/thunderbolt/drivers/thunderbolt-net")
    assert kind_of(read_device("tb", 3, tmp_path)) == "thunderbolt"


def test_a_cabled_thunderbolt_port_names_the_other_host(tmp_path: Path) -> None:
    bus = tmp_path / "bus/thunderbolt/devices"
    write(bus, {"domain0/security": "user", "0-0/unique_id": HOST, "0-0/generation": "4"})
    write(bus / "0-0", {"usb4_port1/link": "usb4", "usb4_port2/link": "none"})
    write(bus / "0-1", {"unique_id": PEER, "device_name": "box-b", "uevent": "DEVTYPE=thunderbolt_xdomain"})
    write(bus, {"0-1/rx_speed": "20.0 Gb/s", "0-1/rx_lanes": "2", "0-1.0/net/thunderbolt0/mtu": "65520"})
    found = read_thunderbolt(tmp_path)
    assert not isinstance(found, Unread)
    first, second = found
    assert (first.domain, first.peer_domain, first.peer_name) == (HOST.upper(), PEER.upper(), "box-b")
    assert (first.interface, first.gbps, first.generation) == ("thunderbolt0", 40, 4)
    assert (second.peer_domain, second.gbps, second.interface) == ("", None, "")


def test_a_dock_on_linux_is_no_peer_and_no_bus_is_not_read(tmp_path: Path) -> None:
    assert isinstance(read_thunderbolt(tmp_path), Unread)
    bus = tmp_path / "bus/thunderbolt/devices"
    write(bus, {"1-0/unique_id": HOST, "1-0/generation": "3", "1-1/unique_id": PEER, "1-1/device_name": "TS4"})
    write(bus / "1-1", {"uevent": "DEVTYPE=thunderbolt_device"})
    found = read_thunderbolt(tmp_path)
    assert not isinstance(found, Unread)
    assert [(port.port, port.peer_domain, port.peer_name, port.generation) for port in found] == [("1.1", "", "TS4", 3)]


def test_infiniband_devices_are_read_with_their_gids(tmp_path: Path) -> None:
    assert read_infiniband(tmp_path) == ()
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    write(port, {"state": "4: ACTIVE", "gids/0": "fe80:0000:0000:0000:a288:c2ff:fe03:0001"})
    write(port, {"gids/1": "0000:0000:0000:0000:0000:ffff:0a16:74dc", "gid_attrs/ndevs/0": "enp1s0"})
    assert read_infiniband(tmp_path) == (RdmaDevice(name="mlx5_0", interface="enp1s0", active=True, ipv4_gid=True),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('PRETTY_NAME="Debian GNU/Linux 12"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\n', ("Debian GNU/Linux", "12")),
        ("NAME=Fedora\nVERSION_ID=42\n", ("Fedora", "42")),
        ('NAME="Arch Linux"\nBUILD_ID=rolling\n', ("Arch Linux", "")),
        ("# comment\nNAME='openSUSE Leap'\nVERSION_ID='15.6'", ("openSUSE Leap", "15.6")),
        ('NAME="broken\nVERSION_ID=1\n', ('"broken', "1")),
    ],
)
def test_distributions(text: str, expected: tuple[str, str]) -> None:
    assert parse_os_release(text) == expected
    assert isinstance(parse_os_release("ID=x"), Unread)


def test_memory_pressure() -> None:
    stall = "some avg10=12.50 avg60=1.0 avg300=0.1 total=1\nfull avg10=3.25 avg60=0.2 avg300=0.0 total=1\n"
    assert parse_pressure(stall) == (12.5, 3.25)
    assert isinstance(parse_pressure(""), Unread)


@pytest.mark.parametrize(
    ("stall", "available", "word"),
    [
        ((0.0, 0.0), 50, "normal"),
        ((12.5, 3.0), 50, "warning"),
        ((40.0, 12.0), 50, "critical"),
        ((0.0, 0.0), 5, "warning"),
        ((0.0, 0.0), 1, "critical"),
        (Unread("no PSI"), 50, "normal"),
        (Unread("no PSI"), 1, "critical"),
    ],
)
def test_pressure_is_by_stalls_and_by_what_is_left(
    stall: tuple[float, float] | Unread, available: int, word: str
) -> None:
    assert pressure_of(stall, 100, available) == word


@pytest.mark.parametrize(
    ("text", "chip"),
    [
        ("processor\t: 0\nmodel name\t: AMD  Ryzen AI MAX+ 395\n", "AMD Ryzen AI MAX+ 395"),
        (
            "processor\t: 0\nCPU part\t: 0xd0b\n\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n",
            "Raspberry Pi 5 Model B Rev 1.0",
        ),
    ],
)
def test_processors(text: str, chip: str) -> None:
    assert parse_cpuinfo(text) == chip
    assert isinstance(parse_cpuinfo("processor : 0\n"), Unread)


def test_nvidia_gpus() -> None:
    text = "NVIDIA GeForce RTX 4090, 24564, 1203\nNVIDIA GB10, [N/A], [N/A]\n"
    assert parse_nvidia_smi(text) == (
        Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=24564 * 2**20, free_bytes=1203 * 2**20),
        Gpu(name="NVIDIA GB10"),
    )
    odd_texts = (
        "",
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "X, 24564\n",
    )
    for odd in odd_texts:
        assert isinstance(parse_nvidia_smi(odd), Unread)


def test_ufw_and_blas() -> None:
    assert parse_ufw("# /etc/ufw/ufw.conf\nENABLED=yes\nLOGLEVEL=low\n") is True
    assert parse_ufw("ENABLED=no\n") is False
    assert isinstance(parse_ufw("LOGLEVEL=low\n"), Unread)
    line = "7f00-7f01 r-xp 00000000 08:01 42   /usr/lib/x/{}\n"
    assert blas_of(line.format("libblas-bd8a282c.so.3.10.0")) == "reference BLAS"
    assert blas_of(line.format("libblas.so.3") + line.format("libopenblas.so.0")) == "OpenBLAS"
    assert blas_of(line.format("libc.so.6")) == ""
