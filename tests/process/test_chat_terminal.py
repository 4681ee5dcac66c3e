"""`muster chat` against a real cluster: on a terminal as a person types, and in a pipe."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from kit.terminal import Terminal, on_terminal
from kit.waiting import until

from muster.local import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.timeout(120)]

CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
#: As it stands at the end of what is shown.
PROMPT = r">[\s\x08]*$"
#: The model answers in small letters and never ends by itself.
ANSWER = r"[a-z]{8}"


class Chat:
    """Runs `muster chat` against one cluster."""

    def __init__(self, address: str, directory: Path, http: str) -> None:
        self.http = http
        self.directory = directory
        self.home = directory / "home"
        self.environment = {"MUSTER_COORDINATOR": address, "MUSTER_HOME": str(self.home)}

    @contextmanager
    def terminal(self, *options: str) -> Generator[Terminal]:
        with on_terminal(
            "-m", "muster", "chat", *options, directory=self.directory, environment=self.environment
        ) as terminal:
            terminal.wait_for(PROMPT)
            yield terminal

    def pipe(self, text: str, *options: str) -> subprocess.CompletedProcess[str]:
        return muster(self.environment, "chat", *options, stdin=text)

    def running(self) -> int:
        """How many answers are under way, as the cluster says."""
        (model,) = httpx.get(f"{self.http}/api/models").raise_for_status().json()["models"]
        return model["running_requests"] + model["waiting_requests"]


def muster(environment: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    directory = tmp_path_factory.mktemp("chat")
    model = directory / "letters"
    subprocess.run([sys.executable, "-m", "muster.bench.tiny_model", "tiny", str(model)], check=True, timeout=60)
    with LocalCluster(directory / "cluster", ("a",), node_options=("--pool", "0")) as cluster:
        made = Chat(cluster.address, directory, cluster.http)
        assert "no model is served" in made.pipe("Hello\n").stderr
        created = muster(made.environment, "create", str(model), "--wait")
        assert created.returncode == 0, created.stderr
        yield made


def test_a_question_is_answered_and_the_conversation_goes_on(chat: Chat) -> None:
    with chat.terminal("--max-tokens", "12", "--system", "Be brief.") as terminal:
        terminal.type("Hello\r")
        terminal.wait_for(ANSWER)
        first = terminal.wait_for(r"12 tokens \(length\).*prompt (\d+) tokens" + ".*" + PROMPT)
        terminal.type("And then?\r")
        second = terminal.wait_for(r"12 tokens \(length\).*prompt (\d+) tokens" + ".*" + PROMPT)
        assert int(second[1]) > int(first[1]) + 12
        terminal.type("/save talk.json\r")
        terminal.wait_for("Written to talk.json")
        terminal.type("/clear\r/tokens\r")
        terminal.wait_for(r"0 answers, 24 tokens generated.*" + PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    saved = json.loads((chat.directory / "talk.json").read_text())
    assert [turn["role"] for turn in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[3]["content"] == "And then?" and len(saved[2]["content"]) == 12


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Chat) -> None:
    with chat.terminal() as terminal:
        terminal.type("Go on for ever\r")
        terminal.wait_for(ANSWER)
        assert chat.running() == 1
        terminal.type(CTRL_C)
        terminal.wait_for("stopped.*" + PROMPT, 10)
        until(lambda: chat.running() == 0, "the ranks have stopped, too", 10)
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-D leaves the chat.*" + PROMPT)
        terminal.type("/exit\r")
        assert terminal.wait_end() == 0


def test_ctrl_c_clears_a_line_that_is_being_typed(chat: Chat) -> None:
    with chat.terminal("--max-tokens", "4") as terminal:
        terminal.type("nonsense" + CTRL_C + "/tokens\r")
        terminal.wait_for("0 answers.*" + PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
        assert "leaves the chat.\r\n" not in terminal.shown.partition("/tokens")[2]


def test_a_question_may_have_several_lines(chat: Chat) -> None:
    with chat.terminal("--max-tokens", "4") as terminal:
        terminal.type("one" + ALT_ENTER + "two\\\rthree\r")
        terminal.wait_for(r"4 tokens.*" + PROMPT)
        terminal.type("\x1b[200~four\nfive\x1b[201~\r")
        terminal.wait_for(r"4 tokens.*" + PROMPT)
        terminal.type("/save lines.json\r")
        terminal.wait_for("Written")
    questions = [turn["content"] for turn in json.loads((chat.directory / "lines.json").read_text())[::2]]
    assert questions == ["one\ntwo\nthree", "four\nfive"]


def test_what_was_typed_is_remembered_for_this_user_alone(chat: Chat) -> None:
    with chat.terminal("--max-tokens", "4") as terminal:
        terminal.type("remember me\r")
        terminal.wait_for(r"4 tokens.*" + PROMPT)
    history = chat.home / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with chat.terminal("--max-tokens", "4") as terminal:
        terminal.type("\x1b[A")  # the key "up"
        terminal.wait_for("remember me")


def test_sigterm_ends_it_and_the_terminal_is_as_before(chat: Chat) -> None:
    with chat.terminal() as terminal:
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait_end() == 128 + signal.SIGTERM


def test_in_a_pipe_each_line_is_a_question(chat: Chat) -> None:
    done = chat.pipe("One\n\nTwo\n/help", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert [len(answer) for answer in answers] == [5, 5, 5] and "".join(answers).islower()
    assert done.stderr == ""


def test_in_a_pipe_a_failure_is_told_and_counts(chat: Chat) -> None:
    done = chat.pipe("too long " * 2000 + "\nshort\n", "--max-tokens", "5")
    assert done.returncode == 1
    assert len(done.stdout.strip()) == 5
    assert "context" in done.stderr


def test_the_same_seed_gives_the_same_answer(chat: Chat) -> None:
    texts = [
        chat.pipe("Hello\n", "--max-tokens", "20", "--temperature", "1.5", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_model_that_is_not_there_is_named_with_those_that_are(chat: Chat) -> None:
    done = chat.pipe("Hello\n", "nothing")
    assert done.returncode == 2
    assert "the models are: letters" in done.stderr


def test_a_coordinator_that_goes_takes_the_answer_with_it(chat: Chat, tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", ("a",), node_options=("--pool", "0")) as cluster:
        environment = {**chat.environment, "MUSTER_COORDINATOR": cluster.address}
        made = muster(environment, "create", str(chat.directory / "letters"), "--wait")
        assert made.returncode == 0, made.stderr
        with on_terminal("-m", "muster", "chat", directory=tmp_path, environment=environment) as terminal:
            terminal.wait_for(PROMPT)
            terminal.type("Go on for ever\r")
            terminal.wait_for(ANSWER)
            cluster.kill("coordinator")
            terminal.wait_for("the rest of this answer is lost")
            terminal.wait_for(PROMPT)
            terminal.type(CTRL_D)
            assert terminal.wait_end() == 0
