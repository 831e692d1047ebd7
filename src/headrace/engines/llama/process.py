"""The engine process: a socket to the gateway on one side, an ``EngineCore`` on the other.

Between two steps the loop takes in whatever messages have arrived; with nothing to do it sleeps in the
socket. It ends when the gateway says so or is gone. Run by ``client.LlamaEngine`` as
``python -m headrace.engines.llama.process FD``.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import NoReturn

from headrace.engines.llama.build import Engine, build
from headrace.engines.llama.channel import Channel, GatewayGone
from headrace.engines.llama.loop import EngineLoop
from headrace.errors import EngineError, HeadraceError
from headrace.messages.engine import Fatal, Start


def main(arguments: list[str]) -> int:
    """Entry point of the process; ``arguments`` is the socket's file descriptor. Returns the exit code."""
    # The gateway decides when to stop; a Ctrl-C or a service manager's SIGTERM reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    engine: Engine | None = None
    try:
        first, *rest = channel.receive(wait_s=None)
        if not isinstance(first, Start) or rest:
            raise EngineError("the first message must be Start, alone")
        engine = build(first)
        channel.send(engine.ready)
        # What was loaded stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        EngineLoop(engine, channel, fixed_threads=first.threads is not None).run()
    except GatewayGone:
        return 0
    except HeadraceError as error:
        channel.send(Fatal(str(error)))
        return 1
    finally:
        if engine is not None:
            engine.core.residents.close_stores()  # files and locks; all else goes with the process
    return 0


def _exit(code: int) -> NoReturn:
    # libllama's and OpenMP's own exit handlers are slow and can hang; everything was already given back.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
