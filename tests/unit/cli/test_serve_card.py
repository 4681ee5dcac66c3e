"""The lines that `muster serve` prints are lines that can be pasted."""

from __future__ import annotations

import ast
import json
import shlex

import pytest

from muster.cli.serve_card import card, curl_line, python_lines

URL = "http://127.0.0.1:5713"
NAMES = ["tiny", "owner/model-4bit", 'it\'s "quoted" $HOME']


@pytest.mark.parametrize("name", NAMES)
def test_the_curl_line_is_one_command_with_a_valid_body(name: str) -> None:
    words = shlex.split(curl_line(name, URL, keyed=False))
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == name and body["messages"][0]["role"] == "user"


@pytest.mark.parametrize("name", NAMES)
def test_the_python_lines_are_python(name: str) -> None:
    lines = python_lines(name, URL, keyed=False)
    assert len(lines) == 3
    strings = [node.value for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Constant)]
    assert name in strings and f"{URL}/v1" in strings


def test_a_key_is_named_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_API_KEY", "secret")
    text = card("m", 2, URL, coordinator="", own=True)
    assert "secret" not in text
    assert 'Authorization: Bearer $MUSTER_API_KEY"' in text
    ast.parse("\n".join(python_lines("m", URL, keyed=True)))


def test_what_is_started_apart_is_told_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_API_KEY", raising=False)
    text = card("m", 1, URL, coordinator="127.0.0.1:9", own=True)
    assert "served on 1 rank, at http://127.0.0.1:5713/v1" in text
    assert "muster chat m --coordinator 127.0.0.1:9" in text
    assert "--coordinator" not in card("m", 1, URL, coordinator="", own=True)


def test_without_an_address_no_line_is_made_up() -> None:
    text = card("m", 2, "", coordinator="", own=False)
    assert "curl" not in text and "not known" in text and "Ctrl-C stops serving the model" in text
