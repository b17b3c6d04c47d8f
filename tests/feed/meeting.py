"""A rendezvous for tests without torch: the test's process collects the members' cards over a unix socket."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import socket
import threading
from typing import Any

from headrace.errors import FeedTimeout


class Meeting:
    """The test's side. Any number of exchanges: the n-th of each member of a group belong together."""

    def __init__(self) -> None:
        self.address = f"headrace-test-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._waiting: dict[str, list[tuple[int, str, socket.socket]]] = {}
        self._posted: dict[str, str] = {}
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection.makefile() as file:
                line = file.readline()
            if not line:
                connection.close()
                return
            card = json.loads(line)
            if "key" in card:
                self._pin(card, connection)
                continue
            table = self._waiting.setdefault(card["name"], [])
            table.append((card["index"], card["payload"], connection))
            if len(table) == card["size"]:
                payloads = json.dumps([payload for _, payload, _ in sorted(table, key=lambda one: one[0])]) + "\n"
                for _, _, guest in self._waiting.pop(card["name"]):
                    with contextlib.suppress(BrokenPipeError):  # it gave up
                        guest.sendall(payloads.encode())
                    guest.close()

    def _pin(self, card: dict[str, Any], connection: socket.socket) -> None:
        """Something that is posted, or looked for."""
        if "value" in card:
            self._posted[card["key"]] = card["value"]
        connection.sendall((json.dumps(self._posted.get(card["key"])) + "\n").encode())
        connection.close()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect("\0" + self.address)
        self._thread.join()
        self._listener.close()
        for table in self._waiting.values():
            for _, _, guest in table:
                guest.close()


class MeetingRendezvous:
    """A member's side; see headrace.feed.rendezvous.Rendezvous."""

    def __init__(self, address: str, group: str, index: int, size: int, number: int) -> None:
        self._address, self._hello = address, {"name": f"{group}/{number}", "index": index, "size": size}

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        hello: dict[str, Any] = self._hello | {"payload": base64.b64encode(payload).decode()}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + self._address)
            connection.sendall((json.dumps(hello) + "\n").encode())
            connection.settimeout(timeout_s)
            try:
                with connection.makefile() as file:
                    return [base64.b64decode(one) for one in json.loads(file.readline())]
            except TimeoutError:
                raise FeedTimeout("the other ranks to make their feeds", timeout_s=timeout_s) from None

    def post(self, key: str, value: bytes) -> None:
        self._ask({"key": f"{self._hello['name']}/{key}", "value": value.decode()})

    def look(self, key: str) -> bytes | None:
        value = self._ask({"key": f"{self._hello['name']}/{key}"})
        return None if value is None else str(value).encode()

    def _ask(self, card: dict[str, Any]) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + self._address)
            connection.sendall((json.dumps(card) + "\n").encode())
            with connection.makefile() as file:
                return json.loads(file.readline())
