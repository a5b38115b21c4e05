"""Messages: a JSON text after its length in eight bytes, the same over the socket and over the pipes of the ranks."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]
_HEADER = 8


def encode(message: Message) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(_HEADER, "little") + body


class Decoder:
    """Collects bytes as they arrive and gives back whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER:
            end = _HEADER + int.from_bytes(self._buffer[:_HEADER], "little")
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[_HEADER:end]))
            del self._buffer[:end]
        return messages
