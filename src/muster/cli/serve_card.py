"""What a user is told once a model is served: lines that work when they are pasted. Pure."""

from __future__ import annotations

import json
import os
import shlex

#: Where the key of an API that has one is found; the lines name the variable, not the key.
KEY_VARIABLE = "MUSTER_API_KEY"
_QUESTION = "What can you do?"


def card(model: str, ranks: int, http: str, *, coordinator: str, own: bool) -> str:
    """The text.

    Args:
        model: What clients call it.
        ranks: How many serve it.
        http: Base URL of the HTTP API without a path; empty where it is not known.
        coordinator: The coordinator's address, where commands have to be told.
        own: Whether the whole cluster ends with the command.
    """
    where = f"at {http}/v1" if http else "but where the HTTP API of that coordinator is, is not known: see its log"
    lines = [f"{model} is served on {ranks} {'rank' if ranks == 1 else 'ranks'}, {where}", ""]
    if http:
        keyed = KEY_VARIABLE in os.environ
        lines += [curl_line(model, http, keyed=keyed), "", *python_lines(model, http, keyed=keyed), ""]
    option = f" --coordinator {coordinator}" if coordinator else ""
    ends = "the model and everything that was started for it" if own else "serving the model"
    lines += [f"In another terminal: muster chat {shlex.quote(model)}{option}", f"Ctrl-C stops {ends}.", ""]
    return "\n".join(lines)


def curl_line(model: str, http: str, *, keyed: bool) -> str:
    """A chat completion by curl."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": _QUESTION}]}, ensure_ascii=False)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    return f"curl {http}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def python_lines(model: str, http: str, *, keyed: bool) -> list[str]:
    """The same by the openai client."""
    key = f'__import__("os").environ["{KEY_VARIABLE}"]' if keyed else '"none"'
    messages = f'[{{"role": "user", "content": "{_QUESTION}"}}]'
    return [
        "from openai import OpenAI",
        f"client = OpenAI(base_url={json.dumps(http + '/v1')}, api_key={key})",
        f"print(client.chat.completions.create(model={json.dumps(model)}, messages={messages})"
        ".choices[0].message.content)",
    ]
