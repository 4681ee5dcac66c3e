"""What a runner tells its worker of an error that nobody raised on purpose."""

from __future__ import annotations

import pytest

from muster.runner.main import is_echo, unexpected

GPU = "[METAL] Command buffer execution failed: Caused GPU Timeout Error"


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("[jaccl] Recv failed with error code 12", "the connection between the ranks broke", "at that rank's log"),
        ("[jaccl] Send failed with errno=32", "the connection between the ranks broke", "at that rank's log"),
        ("[ring] connection to a peer was lost", "a neighbour's process ended", "at that rank's log"),
        (GPU, "the GPU waited too long for a message of another rank", "CPU's stream"),
    ],
)
def test_a_connection_that_broke_while_running_is_an_echo_that_says_why(text: str, cause: str, remedy: str) -> None:
    failure = unexpected(RuntimeError(text), 2)
    assert (failure.kind, failure.secondary, failure.retryable) == ("peer-lost", True, True)
    assert failure.message == f"{failure.message.partition(';')[0]}; MLX says: {text}"
    assert failure.message.startswith(cause)
    assert remedy in failure.remedy


def test_what_only_a_reboot_mends_is_not_tried_again() -> None:
    failure = unexpected(RuntimeError("[jaccl] Could not register memory region"), 2)
    assert (failure.kind, failure.retryable, failure.secondary) == ("rdma-unusable", False, False)
    assert "holds about 100 regions" in failure.message
    assert failure.remedy.startswith("Delete the other jaccl instance")


def test_other_texts_of_mlx_are_explained_and_those_of_others_are_not() -> None:
    told = unexpected(ValueError("[ring] Send only supported to direct neighbors but 3 is none"), 4)
    assert (told.kind, told.secondary) == ("internal", False)
    assert "direct neighbours" in told.message
    for text in ("register memory region", "json is no answer", GPU):
        plain = unexpected(ValueError(text), 1)
        assert (plain.kind, plain.message) == ("internal", f"ValueError: {text}")


def test_an_error_code_of_a_completion_is_an_echo() -> None:
    assert is_echo("[jaccl] Send failed with error code 5")
    assert not is_echo("[jaccl] Changing queue pair to RTR failed with errno 22")
