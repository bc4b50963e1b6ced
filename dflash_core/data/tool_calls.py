"""Tool calls of a turn, as data sets write them, in the form that chat templates read."""

from __future__ import annotations

from typing import Any

from dflash_core.data.turns import RowError, json_or_none


def calls_of(turn: dict[str, Any], number: int) -> list[Any]:
    """Return the tool calls of a turn: `tool_calls`, or the older `function_call`."""
    name = next((name for name in ("tool_calls", "function_call") if turn.get(name)), None)
    return [] if name is None else call_list(turn[name], f"turn {number}: {name}")


def call_list(calls: Any, where: str) -> list[Any]:
    """Return the tool calls of a list, of one object, or of the JSON text of either."""
    if isinstance(calls, str):
        calls = json_or_none(calls) if calls.strip() not in ("", "null") else []
    if not isinstance(calls, dict | list):
        raise RowError("wrong shape", f"{where} is not a JSON object or a list of them")
    return calls if isinstance(calls, list) else [calls]


def tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call as {"type", "function": {"name", "arguments"}}, its arguments parsed if possible."""
    if not isinstance(call, dict):
        raise RowError("wrong shape", "a tool call is not an object")
    function: dict[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
    if not isinstance(function.get("name"), str):
        raise RowError("wrong shape", "a tool call has no name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        parsed = json_or_none(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }
    if call.get("id") is not None:
        out["id"] = call["id"]
    return out
