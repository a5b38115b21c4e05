"""The fork server: imports once, then forks the ranks of one job after the other, or of several at a time.

It never starts a thread or a process group, so a fork of it is as good as a fresh process. It leaves when it is idle, when all for whom it
worked have ended, or when a client comes with another fingerprint (after the jobs it has). Started by pipeline.launch.client.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from pipeline.launch.address import fingerprint
from pipeline.launch.jobs import Rank, RunningJob
from pipeline.launch.preload import preload
from pipeline.launch.processes import Process, is_open
from pipeline.launch.protocol import Decoder, Message, encode
from pipeline.launch.ranks import CPU_ENVIRONMENT

_TICK_SECONDS = 0.5  # between two looks at the starters
_URGENT_SECONDS = 0.02
_SEND_SECONDS = 10.0


class Client:
    """A connection and, once it has asked, its job."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.decoder = Decoder()
        self.fds: list[int] = []
        self.job: RunningJob | None = None
        self.gone = False


class Server:
    def __init__(
        self, listener: socket.socket, socket_path: Path, code: str, starter: Process, idle_seconds: float, library_fds: set[int]
    ) -> None:
        self.listener, self.socket_path, self.code = listener, socket_path, code
        self.inode = socket_path.stat().st_ino
        self.starters = {starter}
        self.idle_seconds = idle_seconds
        self.idle_since = time.monotonic()
        self.library_fds = library_fds
        self.clients: list[Client] = []
        self.leaving = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        wake, self._waker = socket.socketpair()  # a byte at every signal, so that the end of a rank wakes the loop
        for end in (wake, self._waker):
            end.setblocking(False)
        self.selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.set_wakeup_fd(self._waker.fileno())

    # --- the loop ---------------------------------------------------------------------------------------------------------
    def serve(self) -> None:
        try:
            while not (self.leaving and not self.clients):
                urgent = any(client.job and client.job.urgent for client in self.clients)
                for key, _ in self.selector.select(_URGENT_SECONDS if urgent else _TICK_SECONDS):
                    key.data()
                self.collect_ranks()
                self.tick(time.monotonic())
        finally:
            self.leave()
            for client in self.clients:
                if client.job:
                    client.job.kill()

    def collect_ranks(self) -> None:
        for client in self.clients:
            for rank in client.job.ranks if client.job else []:
                if not rank.ended:
                    pid, status = os.waitpid(rank.pid, os.WNOHANG)
                    if pid and client.job:
                        client.job.collect(rank, status)

    def tick(self, now: float) -> None:
        self.starters = {starter for starter in self.starters if starter.alive()}
        for client in list(self.clients):
            job = client.job
            if job is None:
                if client.gone:
                    self.drop(client)
                continue
            if client.gone or job.starter not in self.starters:
                job.cancel("the client or the process that started it has ended")
            job.tick(now)
            if job.ended:
                self.finish(client, job)
                self.idle_since = now
        busy = any(client.job for client in self.clients)
        if not self.starters or (not busy and now - self.idle_since > self.idle_seconds):
            self.leave()

    def leave(self) -> None:
        """Takes no more jobs. The name goes before the listener, so that no client can bind a new server to it in between."""
        if self.leaving:
            return
        self.leaving = True
        try:
            if self.socket_path.stat().st_ino == self.inode:
                self.socket_path.unlink()
        except FileNotFoundError:
            pass
        self.selector.unregister(self.listener)
        self.listener.close()
        for client in [client for client in self.clients if client.job is None]:
            self.drop(client)

    # --- clients ----------------------------------------------------------------------------------------------------------
    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # closed since the selector saw it, or the client has gone already
            return
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        client = Client(connection)
        self.clients.append(client)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.read(client))

    def read(self, client: Client) -> None:
        if client not in self.clients:  # dropped by an event of the same moment
            return
        try:
            data, fds, _, _ = socket.recv_fds(client.connection, 1 << 16, 2)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        client.fds += fds
        if not data:
            client.gone = True
            self.selector.unregister(client.connection)  # else it stays readable while the ranks end
        for request in client.decoder.feed(data):
            self.take(client, request)

    def take(self, client: Client, request: Message) -> None:
        if client.job is not None:
            return
        if self.leaving or request["fingerprint"] != self.code:
            self.leave_for(client)
            return
        self.send(client, {"kind": "taken"})
        self.starters.add(Process(*request["starter"]))
        self.idle_seconds = request["idle_seconds"]
        client.job, client.fds = RunningJob(request, client.fds), []
        client.job.start(self.library_fds)
        for rank in client.job.ranks:
            self.selector.register(rank.reader, selectors.EVENT_READ, self.reader_of(rank))

    def leave_for(self, client: Client) -> None:
        """Another fingerprint: the client starts our successor as soon as it hears this, so the name must be free before."""
        waiting = self.clients
        self.clients = [other for other in waiting if other is not client]
        self.leave()
        self.clients.append(client)
        self.send(client, {"kind": "leaving"})
        self.drop(client)

    def reader_of(self, rank: Rank):
        def read() -> None:
            if not rank.read():
                self.selector.unregister(rank.reader)

        return read

    def finish(self, client: Client, job: RunningJob) -> None:
        for rank in job.ranks:
            if rank.reader in self.selector.get_map():
                self.selector.unregister(rank.reader)
        if not client.gone:
            self.send(client, job.answer())
        job.close()
        self.drop(client)

    def send(self, client: Client, message: Message) -> None:
        try:
            client.connection.settimeout(_SEND_SECONDS)
            client.connection.sendall(encode(message))
            client.connection.setblocking(False)
        except OSError:  # it has gone: its job ends at the next tick
            pass

    def drop(self, client: Client) -> None:
        self.clients.remove(client)
        if not client.gone:
            self.selector.unregister(client.connection)
        client.connection.close()
        for fd in client.fds:
            os.close(fd)


def main() -> None:
    setup = json.loads(sys.argv[1])
    socket_path = Path(setup["folder"], "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path))
    listener.listen(128)
    if os.fork():  # the client waits for this process only: by now it can connect
        os._exit(0)
    environment = dict(os.environ)
    os.environ.update(CPU_ENVIRONMENT, OMP_NUM_THREADS="1")
    starter = Process(*setup["starter"])
    preload(starter.alive)  # who is killed during the imports leaves no server behind
    library_fds = {fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)} - {0, 1, 2, listener.fileno()}
    # looked at again after the imports: when a file was saved since the client's look, nobody may take us for what we are not
    code = setup["fingerprint"] if fingerprint(environment) == setup["fingerprint"] else "changed during the start"
    listener.setblocking(False)
    server = Server(listener, socket_path, code, starter, setup["idle_seconds"], library_fds)
    server.serve()


if __name__ == "__main__":
    main()
