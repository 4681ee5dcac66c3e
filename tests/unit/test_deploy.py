"""The files in deploy/ name commands and options that exist."""

from __future__ import annotations

import configparser
import plistlib
from pathlib import Path

import pytest
from typer.main import get_command

from muster.cli.app import app

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_command(arguments: list[str]) -> None:
    program, name, *options = arguments
    assert program.endswith("/muster")
    command = get_command(app)
    found = command.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    known = {option for parameter in found.params for option in parameter.opts}
    for option in options:
        if option.startswith("--"):
            assert option in known, f"muster {name} has no {option}"


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_a_systemd_unit_starts_a_command_that_exists(path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read(path)
    check_command(unit["Service"]["ExecStart"].split())
    assert unit["Service"]["Restart"] == "always"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("path", sorted((DEPLOY / "launchd").glob("*.plist")), ids=lambda path: path.name)
def test_a_launchd_agent_starts_a_command_that_exists(path: Path) -> None:
    agent = plistlib.loads(path.read_bytes())
    check_command(agent["ProgramArguments"])
    assert agent["Label"] == path.stem
    assert agent["KeepAlive"]
