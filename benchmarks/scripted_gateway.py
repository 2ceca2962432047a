"""The gateway as `loragate serve` runs it, with another module for an engine.

    python -m benchmarks.scripted_gateway DESCRIPTOR WORKER

The settings come from the environment.
"""

import socket
import sys

from gateway import settings
from gateway.app import create_app
from gateway.engine.process import ProcessEngine
from gateway.serve import Server
from gateway.telemetry import configure_logging


def main() -> None:
    current = settings.load()
    configure_logging()
    engine = ProcessEngine(current.engine, worker=sys.argv[2])
    listener = socket.socket(fileno=int(sys.argv[1]))
    Server(current, create_app(current, engine)).run(sockets=[listener])


if __name__ == "__main__":
    main()
