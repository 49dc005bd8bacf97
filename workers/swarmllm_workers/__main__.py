"""`swarmllm-worker --socket PATH`: started by the daemon, ends with it.

libgomp's threads wait for each other at a barrier by spinning, some hundred thousand times, before they
sleep. A worker that has done its part then holds the core that the next one needs. Measured on two cores
with a 0.5B model in Q8_0 and two threads, ms per token, alone and as two workers that take turns: libgomp's
default 12.7 and 25.9, asleep at once (OMP_WAIT_POLICY=PASSIVE) 21.3 and 21.8, spinning 1000 times 12.7 and
13.8.

Where every core computes, each thread is kept to its own. A woken worker's threads are put where the last
one's are just leaving, both on one core as like as not, and a core that is idle for less than half a
millisecond at a time fetches none of them: four workers in turns took 31.3 ms per token without that, 20.1
with it, where one took 18.8. With cores to spare nothing is gained, and the system knows better.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from swarmllm_workers import operating_system

SPIN_COUNT: Final = "1000"
SWITCH_S: Final = 0.0005
"""How long Python code of another thread may keep a decode step waiting, where it would not let go itself."""


def openmp_settings(n_threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for libgomp. Those that the person who started the daemon has set stay as
    they are."""
    settings = {}
    if not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        settings["GOMP_SPINCOUNT"] = SPIN_COUNT
    cores = sorted(operating_system.cores())
    is_chosen = environment.keys() & {"GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
    if n_threads == len(cores) > 1 and not is_chosen:
        settings["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    return settings


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="swarmllm-worker", description="Runs layers of one model for a daemon."
    )
    parser.add_argument("--socket", required=True, help="Unix socket on which the daemon listens")
    parser.add_argument("--threads", type=int, default=0, help="threads that will compute; 0: not known yet")
    parser.add_argument(
        "--pictures", action="store_true", help="encode pictures for a model instead of running its layers"
    )
    parser.add_argument(
        "--texts", action="store_true", help="encode whole texts with a model of the BERT kind"
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning", "error"],
        help="what goes to stderr",
    )
    options = parser.parse_args(arguments)
    operating_system.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which then closes the socket
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(options.socket)
    except OSError as error:
        sys.exit(f"cannot connect to {options.socket}: {error.strerror}")
    os.environ.update(openmp_settings(options.threads, os.environ))
    os.environ.setdefault(
        "GGML_NO_BACKTRACE", "1"
    )  # an abort would start a debugger and outlive its cause by seconds
    if options.pictures:
        from swarmllm_workers.vision.server import EncoderServer

        with connection:
            EncoderServer(connection, os.getpid()).serve()
        return
    if options.texts:
        from swarmllm_workers.texts.server import TextEncoderServer

        with connection:
            TextEncoderServer(connection, os.getpid()).serve()
        return
    cores = operating_system.cores()  # before libgomp keeps this thread to one of them
    from swarmllm_workers.server.loop import (
        Server,  # after the environment is set: this loads libllama and OpenMP
    )

    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # what the imports made stays; collections need not look at it again between two tokens
    with connection:
        Server(connection, os.getpid(), cores).serve()


if __name__ == "__main__":
    main()
