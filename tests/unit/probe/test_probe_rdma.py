"""RDMA over Thunderbolt: off, on without devices, ports down, and ports without the address that MLX needs."""

from __future__ import annotations

import macos_samples as samples
import pytest
from macos_samples import ibv_devinfo

from muster.facts import RdmaDevice
from muster.probe.macos_rdma import parse_ibv_devices, parse_ibv_devinfo, parse_rdma_ctl
from muster.probe.reading import Unread

LINK_LOCAL = "fe80:0000:0000:0000:347c:94ff:fecd:45c4"


@pytest.mark.parametrize(
    ("text", "enabled"), [("enabled\n", True), ("disabled\n", False), ("RDMA is enabled\n", True), ("Disabled", False)]
)
def test_rdma_ctl_says_whether_it_is_enabled(text: str, enabled: bool) -> None:
    assert parse_rdma_ctl(text) is enabled


@pytest.mark.parametrize("text", ["", "RDMA is not supported on this device", "not enabled?", "usage: rdma_ctl enable"])
def test_other_words_of_rdma_ctl_are_no_answer(text: str) -> None:
    assert isinstance(parse_rdma_ctl(text), Unread)


def test_devices_are_listed_below_a_head() -> None:
    assert parse_ibv_devices(samples.IBV_DEVICES) == ("rdma_en2", "rdma_en3")
    assert parse_ibv_devices(samples.IBV_DEVICES_OFF) == ()
    assert isinstance(parse_ibv_devices(""), Unread)
    assert isinstance(parse_ibv_devices("dyld: Library not loaded\n"), Unread)


@pytest.mark.parametrize(
    ("gids", "mapped"),
    [
        ((), False),
        ((LINK_LOCAL,), False),
        ((LINK_LOCAL, "::ffff:169.254.10.1"), True),
        ((LINK_LOCAL, "0000:0000:0000:0000:0000:ffff:a9fe:0a01"), True),
        (("fe80::ffff:1:2",), False),
        (("2001:db8::ffff:10.0.0.1",), False),
    ],
)
def test_a_gid_maps_an_ipv4_address_or_does_not(gids: tuple[str, ...], mapped: bool) -> None:
    found = parse_ibv_devinfo(ibv_devinfo("rdma_en3", "PORT_ACTIVE (4)", *gids))
    assert found == (RdmaDevice(name="rdma_en3", interface="en3", active=True, ipv4_gid=mapped),)


def test_without_verbose_nothing_is_known_of_gids() -> None:
    found = parse_ibv_devinfo(ibv_devinfo("rdma_en3", "PORT_ACTIVE (4)", LINK_LOCAL, verbose=False))
    assert found == (RdmaDevice(name="rdma_en3", interface="en3", active=True),)


def test_several_devices_each_have_their_own_state() -> None:
    text = ibv_devinfo("rdma_en2", "PORT_DOWN (1)") + ibv_devinfo("rdma_en3", "PORT_ACTIVE (4)", "::ffff:10.0.0.1")
    found = parse_ibv_devinfo(text)
    assert not isinstance(found, Unread)
    assert [(one.name, one.active, one.ipv4_gid) for one in found] == [
        ("rdma_en2", False, False),
        ("rdma_en3", True, True),
    ]
    assert isinstance(parse_ibv_devinfo("No IB devices found\n"), Unread)
    assert isinstance(parse_ibv_devinfo("hca_id:"), Unread)
