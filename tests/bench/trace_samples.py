"""A trace in every format."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.bench.load.traces import TraceFile, TraceOptions, TraceRow

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-17 18:15:46.6805901,879,55"""


MOONCAKE = """\
{"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 7]}
"""


BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
45.5,ChatGPT,300,0,300,Conversation log
118,GPT-4,417,276,693,Conversation log
"""


def json_lines(*lines: dict[str, object]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def bailian(chat: int, parent: int, at_s: float, inputs: int, outputs: int, kind: str, turn: int, *ids: int) -> str:
    """A line as the Bailian traces have it."""
    lengths = {"input_length": inputs, "output_length": outputs}
    return json_lines(
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, **lengths, "type": kind, "turn": turn}
        | {"hash_ids": list(ids)}
    )


BAILIAN = (
    bailian(55, -1, 1.5, 40, 10, "text", 1, 1, 2, 3)
    + bailian(56, -1, 2.0, 17, 5, "file", 1, 9, 8)
    + bailian(159, 55, 61.114, 64, 13, "text", 2, 1, 2, 3, 4)
    + bailian(160, 159, 70, 80, 13, "text", 3, 1, 2, 3, 4, 5)
    + bailian(161, 7, 71, 80, 13, "search", 4, 6)
)


CHAT: dict[str, object] = {"class": "chat", "lane": "live", "session": "x"}


HEADRACE = json_lines(
    {"at_s": 0.25, "input_tokens": 100, "output_tokens": 7},
    {"at_s": 1, "input_tokens": 200, "output_tokens": 8, **CHAT, "headers": {"x-tenant-id": "t"}},
    {"at_s": 2, "input_tokens": 300, "output_tokens": 9, **CHAT, "hash_ids": [4, 5], "block_tokens": 128},
    {"at_s": 2, "input_tokens": 300, "output_tokens": 9, "session": "y", "turn": 4},
)


def trace(folder: Path, content: str | bytes, options: TraceOptions | None = None) -> TraceFile:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return TraceFile(path, options or TraceOptions())


def rows(folder: Path, content: str | bytes, options: TraceOptions | None = None) -> list[TraceRow]:
    return list(trace(folder, content, options))
