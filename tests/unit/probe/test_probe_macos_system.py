"""The system of a Mac: chip, memory, versions, sleep, firewall."""

from __future__ import annotations

import macos_samples as samples
import pytest

from muster.probe.macos_system import (
    Hardware,
    parse_firewall,
    parse_hardware,
    parse_pmset,
    parse_sw_vers,
    parse_sysctl,
    pressure_of,
    wired_limit_of,
)
from muster.probe.reading import Unread

GIB = 2**30


def test_sysctl_prints_names_and_values() -> None:
    found = parse_sysctl(samples.SYSCTL)
    assert not isinstance(found, Unread)
    assert found["machdep.cpu.brand_string"] == "Apple M4 Max"
    assert pressure_of(found) == "normal"
    assert isinstance(parse_sysctl("sysctl: unknown oid 'hw.x'\n"), Unread)


@pytest.mark.parametrize(("level", "word"), [("1", "normal"), ("2", "warning"), ("4", "critical")])
def test_the_kernel_says_how_short_memory_is(level: str, word: str) -> None:
    assert pressure_of({"kern.memorystatus_vm_pressure_level": level}) == word
    assert isinstance(pressure_of({"kern.memorystatus_vm_pressure_level": "3"}), Unread)
    assert isinstance(pressure_of({}), Unread)


@pytest.mark.parametrize(
    ("limit", "memory", "expected"),
    [
        ("0", 128 * GIB, 96 * GIB),
        ("0", 24 * GIB, 16 * GIB),
        ("122880", 128 * GIB, 120 * GIB),
        ("999999", 128 * GIB, 128 * GIB),
    ],
)
def test_the_wired_limit_is_the_operators_or_the_systems_share(limit: str, memory: int, expected: int) -> None:
    assert wired_limit_of({"iogpu.wired_limit_mb": limit}, memory) == expected
    assert isinstance(wired_limit_of({}, memory), Unread)


@pytest.mark.parametrize(("release", "version"), [("15", "15.7.1"), ("26", "26.2")])
def test_versions_of_macos(release: str, version: str) -> None:
    assert parse_sw_vers(samples.SW_VERS[release]) == ("macOS", version)
    assert isinstance(parse_sw_vers("zsh: command not found: sw_vers"), Unread)


def test_minutes_until_sleep() -> None:
    assert parse_pmset(samples.PMSET) == 1
    assert parse_pmset(samples.PMSET.replace(" sleep                1 (", " sleep                0 (")) == 0
    assert isinstance(parse_pmset("Now drawing from 'AC Power'\n"), Unread)


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("Firewall is enabled. (State = 1)\n", "on"),
        ("Firewall is disabled. (State = 0)\n", "off"),
        ("Firewall is blocking all non-essential incoming connections. (State = 2)\n", "on"),
        ("Firewall is enabled.", "on"),
        ("Die Firewall ist aktiviert. (State = 1)", "on"),
    ],
)
def test_the_firewall(text: str, switch: str) -> None:
    assert parse_firewall(text) == (switch, text.strip())
    assert isinstance(parse_firewall(""), Unread)


def test_hardware_of_apple_silicon_and_of_intel() -> None:
    assert parse_hardware(samples.HARDWARE) == Hardware(chip="Apple M4 Max", model="Mac16,9", memory_bytes=128 * GIB)
    intel = '{"SPHardwareDataType": [{"cpu_type": "8-Core Intel Core i9", "physical_memory": "1 TB"}]}'
    assert parse_hardware(intel) == Hardware(chip="8-Core Intel Core i9", memory_bytes=1024 * GIB)
    for text in ("", "{}", '{"SPHardwareDataType": []}', '{"SPHardwareDataType": [3]}'):
        assert isinstance(parse_hardware(text), Unread)
