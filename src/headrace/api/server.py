"""Running the application under uvicorn: listening, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from headrace.api.connection import ConnectionLimits, GuardedProtocol, guarded_protocol
from headrace.api.gateway import Gateway
from headrace.api.tls import renew, tls_context
from headrace.config.schema import Config, ServerConfig
from headrace.errors import ConfigError, HeadraceError

_logger = logging.getLogger(__name__)
_BACKLOG = 1024
_KEEP_ALIVE_S = 75
_CONNECTIONS_CLOSE_S = 5

Reload = Callable[[], Awaitable[ServerConfig]]
"""Reads the configuration again and puts it in force, all of it or nothing; the HTTP edge takes what it returns. Raises
HeadraceError when the configuration is refused."""

Listening = Callable[[str, int], None]


async def serve_http(
    app: ASGIApp,
    gateway: Gateway,
    config: Config,
    *,
    reload: Reload | None = None,
    on_listening: Listening | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, drain, and return. A second signal ends at once; SIGHUP calls ``reload``.

    ``on_listening`` is told the host and the port really bound (port 0 picks a free one). Raises ConfigError
    when the address cannot be bound or the certificate cannot be used. Run it in the main thread's event loop.
    """
    sockets = bind(config.server)
    try:
        server = http_server(app, config.server)
        with _signals(server, gateway, reload):
            if on_listening is not None:
                host, port = sockets[0].getsockname()[:2]
                on_listening(host, port)
            await server.serve(sockets=sockets)
    finally:
        for listener in sockets:
            listener.close()


def bind(server: ServerConfig) -> list[socket.socket]:
    """Listening sockets for every address of ``server.host``. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{server.host!r} is no address of this machine: {error}", where="server.host") from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if server.port == 0:
        # Each address would get another free port.
        addresses = addresses[:1]
    sockets: list[socket.socket] = []
    for family, address in addresses:
        listener = socket.socket(family, socket.SOCK_STREAM)
        sockets.append(listener)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except (OSError, OverflowError) as error:
            for opened in sockets:
                opened.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"cannot listen on {server.host} port {server.port}: {reason}", where="server.port"
            ) from error
    return sockets


def http_server(app: ASGIApp, server: ServerConfig) -> HttpServer:
    """A uvicorn server for ``server.serve(sockets=bind(...))``, which handles no signals. Raises ConfigError when the
    certificate cannot be used."""
    protocol, context = guarded_protocol(_limits(server)), tls_context(server.tls)
    settings = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CONNECTIONS_CLOSE_S,
        backlog=_BACKLOG,
    )
    settings.load()
    settings.ssl = context
    return HttpServer(settings, protocol, context)


def _limits(server: ServerConfig) -> ConnectionLimits:
    return ConnectionLimits(
        head_timeout_s=server.body_timeout_s,
        write_timeout_s=server.write_timeout_s,
        body_timeout_s=server.body_timeout_s,
    )


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: here a signal means drain first."""

    def __init__(
        self, settings: uvicorn.Config, protocol: type[GuardedProtocol], context: ssl.SSLContext | None
    ) -> None:
        super().__init__(settings)
        self._protocol = protocol
        self._context = context

    def reconfigure(self, server: ServerConfig) -> None:
        """Other timeouts, for open connections too; another certificate for those to come. Raises ConfigError."""
        if self._context is not None:
            renew(self._context, server.tls)
        self._protocol.limits = _limits(server)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(server: HttpServer, gateway: Gateway, reload: Reload | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def start(work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = loop.create_task(run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def stop() -> None:
        _logger.info("draining: no new requests, running ones may finish")
        try:
            await gateway.drain()
        finally:
            server.should_exit = True

    async def reload_once() -> None:
        if reload is None:
            return
        try:
            server.reconfigure(await reload())
        except HeadraceError as error:
            _logger.error("the configuration was not reloaded, the old one stays: %s", error)
        except Exception:
            _logger.exception("the configuration was not reloaded")

    def on_stop() -> None:
        if gateway.draining or server.should_exit:
            _logger.warning("second signal: ending at once")
            server.force_exit = server.should_exit = True
            return
        start(stop())

    handlers: dict[signal.Signals, Callable[[], None]] = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop}
    if reload is not None:
        handlers[signal.SIGHUP] = lambda: start(reload_once())
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
        for task in tasks:
            task.cancel()
