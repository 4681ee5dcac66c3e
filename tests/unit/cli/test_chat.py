"""What a chat asks, keeps and shows, and which model it talks with."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import anyio
import msgspec
import pytest
from cluster_states import FAILURE, ONE, instance, state

from muster.cli.chat import Answer, ChatSettings, Conversation, choices, chosen
from muster.cli.chat_lines import lines_of, the_model
from muster.cli.chat_terminal import TerminalScreen, clean, history_file
from muster.errors import RequestError
from muster.replies import Done, Started
from muster.sampling import SamplingParams
from muster.spec import GroupWorkload, InstanceId, ModelWorkload
from muster.state import Broken, Deleting, Instance, Starting

DONE = Done(reason="stop", prompt_tokens=20, completion_tokens=11, seconds_to_first_token=0.5, seconds=1.5)


def conversation(**options: object) -> Conversation:
    return Conversation(msgspec.structs.replace(ChatSettings(model="m", system="Be brief."), **options))


def other(name: str, served: str, found: Instance) -> Instance:
    workload = ModelWorkload(model="/models/x", served_name=served)
    spec = msgspec.structs.replace(found.spec, workload=workload)
    return msgspec.structs.replace(found, id=InstanceId(name), spec=spec)


# --- the conversation ---------------------------------------------------------------------------------------


def test_a_question_is_asked_with_all_that_was_said_before() -> None:
    chat = conversation(sampling=SamplingParams(max_tokens=9), template={"enable_thinking": False})
    chat.keep("one", Answer(text="1", reasoning="hm", done=DONE))
    request = chat.request("two")
    assert [(turn.role, turn.content) for turn in request.messages] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
    ]
    assert (request.instance, request.sampling.max_tokens, request.template) == ("m", 9, {"enable_thinking": False})


def test_what_failed_leaves_no_trace_and_clear_keeps_the_system_prompt() -> None:
    chat = conversation()
    chat.request("lost")
    assert chat.turns == []
    chat.keep("one", Answer(text="1", done=DONE))
    chat.clear()
    assert [turn.role for turn in chat.request("two").messages] == ["system", "user"]
    assert (chat.prompt_tokens, chat.completion_tokens) == (20, 11)


def test_it_is_saved_for_programs_and_for_people() -> None:
    chat = conversation()
    chat.keep("one", Answer(text="ünö\n", done=DONE))
    assert json.loads(chat.as_json())[-1] == {"role": "assistant", "content": "ünö\n"}
    assert chat.as_markdown().startswith("## system\n\nBe brief.\n\n## user\n\none\n")


def test_an_answer_has_its_numbers_in_a_line() -> None:
    answer = Answer(done=DONE, started=Started(prompt_tokens=20, cached_tokens=16))
    assert answer.sentence() == (
        "11 tokens (stop), the first after 0.50 s, 10 tokens/s, prompt 20 tokens, 16 of them cached"
    )


# --- which model --------------------------------------------------------------------------------------------


def test_models_are_known_by_what_clients_call_them() -> None:
    found = state(
        instance(),
        other("b", "big", instance(Starting())),
        other("c", "big", instance(Broken(failure=FAILURE, retry_at_ns=1))),
        other("d", "gone", instance(Deleting())),
        other("e", "broken", instance(Broken(failure=FAILURE))),
        msgspec.structs.replace(instance(workload=GroupWorkload()), id=InstanceId("f")),
    )
    assert [(choice.model, choice.ready) for choice in choices(found)] == [("big", False), ("tiny", True)]
    assert chosen(found, "tiny").model == "tiny"
    assert chosen(found, "one-1a").model == ONE
    with pytest.raises(RequestError, match=r"the models are: big, tiny"):
        chosen(found, "f")


def test_an_instance_is_found_by_its_name() -> None:
    assert chosen(state(instance(name="mine")), "mine").model == ONE


def test_where_nobody_can_be_asked_there_must_be_one_model() -> None:
    assert the_model(state(instance()), "").model == "tiny"
    with pytest.raises(RequestError, match="no model is served") as none:
        the_model(state(), "")
    assert "muster serve" in none.value.remedy
    with pytest.raises(RequestError, match="several models are served: big, tiny"):
        the_model(state(instance(), other("b", "big", instance())), "")


# --- lines --------------------------------------------------------------------------------------------------


def read_lines(descriptor: int) -> list[str]:
    async def run() -> list[str]:
        with anyio.fail_after(10):
            return [line async for line in lines_of(descriptor)]

    return anyio.run(run)


CONTENT = "one\r\ntwo\n\nthrée".encode()


def test_lines_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "questions").write_bytes(CONTENT)
    with (tmp_path / "questions").open("rb") as file:
        assert read_lines(file.fileno()) == ["one", "two", "", "thrée"]


def test_lines_come_from_a_pipe_each_as_soon_as_it_is_there() -> None:
    reading, writing = os.pipe()

    async def run() -> list[str]:
        lines = lines_of(reading)
        os.write(writing, CONTENT[:9])
        found = [await anext(lines)]
        os.write(writing, CONTENT[9:-2])  # within a character
        found += [await anext(lines), await anext(lines)]
        os.write(writing, CONTENT[-2:])
        os.close(writing)
        return [*found, await anext(lines)]

    assert anyio.run(run) == ["one", "two", "", "thrée"]
    os.close(reading)


# --- the terminal -------------------------------------------------------------------------------------------


def test_reasoning_is_dim_and_the_answer_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    screen = TerminalScreen()
    screen.reasoning("let me ")
    screen.reasoning("see")
    screen.text("42")
    screen.end()
    assert capsys.readouterr().out == "\x1b[2mlet me see\n\x1b[0m42\n"


def test_an_answer_that_stops_within_its_reasoning_leaves_the_terminal_plain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = TerminalScreen()
    screen.reasoning("hm")
    screen.end()
    shown = capsys.readouterr().out
    assert shown.endswith("\x1b[0m\n")


def test_a_model_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalScreen().text("a\x1b[2Jb\x07\tc\n")
    assert capsys.readouterr().out == "a�[2Jb�\tc\n"
    assert clean("\x9b31m\r") == "�31m�"


def test_a_long_prompt_is_told_of_on_a_line_that_is_written_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = TerminalScreen()
    screen.reading(512, 2048)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("muster.cli.chat_terminal._READING_SECONDS", -1.0)
    screen.reading(1024, 2048)
    screen.text("a")
    assert re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out) == (
        "\r\x1b[Kreading the prompt, 1024 of 2048 tokens\r\x1b[Ka"
    )


def test_the_history_is_made_private_also_where_it_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    path = history_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("+one\n")
    path.chmod(0o644)
    assert history_file().read_text() == "+one\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
