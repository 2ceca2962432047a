"""A gateway to be killed: `python -m …gateway_process DATA MODEL DATABASE_URL DESCRIPTOR`.

Its engine answers each request with a token every 10 ms.
"""

import socket
import sys
from pathlib import Path

from gateway.app import create_app
from gateway.engine.messages import Submit
from gateway.serve import Server
from tests.fakes import FakeEngine, Script, byte_tokenizer_folder, model_info
from tests.serving import settings_for

STEP_S = 0.01


def main() -> None:
    data, model, url, descriptor = sys.argv[1:]
    settings = settings_for(Path(data), url)
    engine = FakeEngine(model_info(byte_tokenizer_folder(Path(model))), script=_answer)
    listener = socket.socket(fileno=int(descriptor))
    Server(settings, create_app(settings, engine)).run(sockets=[listener])


def _answer(request: Submit) -> Script:
    return Script([[65]] * request.max_tokens, delay_s=STEP_S)


if __name__ == "__main__":
    main()
