"""A model hub on this machine, small enough for a test: the listing and the files of one folder at one commit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(folder: Path, requests: list[str]) -> Iterator[str]:
    """Serve `folder` as repository "owner/model" at REVISION; yields the endpoint, appends the names of the files that were asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.split("?")[0]
            if not path.startswith("/api/models/"):
                name = path.rsplit("/", 1)[1]
                if REVISION not in path or not (folder / name).is_file():
                    return self.send(404, b"")
                if self.command == "GET":
                    requests.append(name)
                return self.send(200, (folder / name).read_bytes(), {"ETag": f'"{name}"', "X-Repo-Commit": REVISION})
            names = sorted(file.name for file in folder.iterdir())
            if "/tree/" in path:
                rows = [{"type": "file", "oid": "0" * 40, "size": (folder / name).stat().st_size, "path": name} for name in names]
                return self.send(200, json.dumps(rows).encode())
            return self.send(
                200, json.dumps({"id": "owner/model", "sha": REVISION, "siblings": [{"rfilename": name} for name in names]}).encode()
            )

        def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
