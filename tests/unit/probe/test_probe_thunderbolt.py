"""Thunderbolt ports of a Mac: generations, speeds, and who is at the other end of the cable."""

from __future__ import annotations

import macos_samples as samples
import pytest
from macos_samples import UUIDS

from muster.facts import ThunderboltPort
from muster.probe.macos_thunderbolt import parse_thunderbolt
from muster.probe.reading import Unread


def ports(text: str, chip: str = "") -> tuple[ThunderboltPort, ...]:
    found = parse_thunderbolt(text, samples.PORTS, chip)
    assert not isinstance(found, Unread), found.reason
    return found


@pytest.mark.parametrize(
    ("text", "generation", "gbps", "count"),
    [(samples.TB5_IDLE, 5, 120, 4), (samples.TB5_IDLE_15, 5, 80, 2), (samples.TB4_IDLE, 4, 40, 3)],
)
def test_an_idle_port_says_what_it_could_do(text: str, generation: int, gbps: int, count: int) -> None:
    found = ports(text)
    assert [port.port for port in found] == [str(number + 1) for number in range(count)]
    assert {(port.generation, port.gbps, port.peer_domain, port.peer_name) for port in found} == {
        (generation, gbps, "", "")
    }


def test_the_ports_have_the_interfaces_of_their_receptacles() -> None:
    assert [port.interface for port in ports(samples.TB5_IDLE)] == ["en2", "en3", "en4", ""]
    unmapped = parse_thunderbolt(samples.TB5_IDLE, {})
    assert not isinstance(unmapped, Unread)
    assert {port.interface for port in unmapped} == {""}


def test_two_macs_on_one_cable_name_each_other() -> None:
    (here,) = [port for port in ports(samples.CABLED_A) if port.peer_domain]
    (there,) = [port for port in ports(samples.CABLED_B) if port.peer_domain]
    assert (here.peer_domain, there.peer_domain) == (there.domain, here.domain)  # case apart
    assert (here.port, here.interface, here.peer_name, here.gbps) == ("2", "en3", "studio-b", 80)
    assert (there.port, there.peer_name, there.generation) == ("1", "studio-a", 5)


def test_a_dock_or_a_display_is_no_peer_and_neither_is_a_mac_behind_a_dock() -> None:
    found = ports(samples.BUSY)
    assert [(port.peer_name, port.peer_domain) for port in found] == [
        ("TS4", ""),
        ("Studio Display", ""),
        ("TS5 Plus", ""),
    ]
    assert [port.gbps for port in found] == [40, 40, 80]
    assert {port.generation for port in found} == {5}, "one fast port tells of all of them"


@pytest.mark.parametrize(
    ("chip", "generation"),
    [
        ("Apple M4 Max", 5),
        ("Apple M3 Ultra", 5),
        ("Apple M4 Pro", 5),
        ("Apple M4", None),
        ("Apple M3 Max", None),
        ("", None),
    ],
)
def test_where_all_ports_are_at_slow_devices_the_chip_decides(chip: str, generation: int | None) -> None:
    assert [port.generation for port in ports(samples.ALL_AT_OLD, chip)] == [generation]


def test_the_computer_is_the_peer_among_several_devices_on_a_port() -> None:
    disk = samples.device("SSD", "Samsung", "thunderbolt_three", "40 Gb/s")
    (port,) = ports(samples.thunderbolt(samples.bus(0, "1", "80 Gb/s", disk, samples.computer("mini", UUIDS[9]))))
    assert (port.peer_name, port.peer_domain) == ("mini", UUIDS[9])


def test_an_intel_mac_has_two_receptacles_on_a_bus() -> None:
    first, second = ports(samples.INTEL)
    assert (first.port, first.peer_domain) == ("1", "")
    assert (second.port, second.peer_domain, second.peer_name) == ("2", UUIDS[6], "imac")
    assert first.domain == second.domain
    assert {first.generation, second.generation} == {3}


def test_no_port_is_not_the_same_as_nothing_read() -> None:
    assert ports(samples.NO_PORTS) == ()
    for text in ("", "{}", "[]", "null", "Keine Hardware gefunden.", '{"SPThunderboltDataType": 7}', "{" * 50_000):
        found = parse_thunderbolt(text, {})
        assert isinstance(found, Unread)
        assert "SPThunderboltDataType" in found.reason


def test_what_is_around_and_what_is_odd_in_the_document_does_not_hinder() -> None:
    text = "2026-01-02 system_profiler[12:34] warning\n" + samples.TB4_IDLE + "\n"
    assert len(ports(text)) == 3
    odd = samples.thunderbolt(
        {"_name": 7, "receptacle_1_tag": {"current_speed_key": 120, "receptacle_id_key": None}, "_items": "none"},
        {"receptacle_1_tag": "none"},
        {},
    )
    (port,) = ports(odd)
    assert (port.port, port.domain, port.generation, port.gbps) == ("1", "", None, None)
