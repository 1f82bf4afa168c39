"""The flags of `python -m kvlane.testing.fake_engine`."""

from __future__ import annotations

import argparse

from kvlane.testing.fake_engine.pairs import FORMS

DESCRIPTION = """An HTTP server that behaves as vLLM's OpenAI server does towards a router.

It prints "ready URL" when it listens. A token is 4 bytes of the prompt. GET /log shows what it was asked.

POST /faults {"NAME": VALUE} switches faults on, {} all off:
  refuse: true                  closes new connections at once; open ones stay
  status: CODE                  answers an error
  poison: TEXT                  answers 500 to requests that have the text in their body
  retry_after: SECONDS          answers 503, or the status given, with Retry-After
  hang_before_first_byte: true  never answers
  die_at_chunk: N               resets the connection after N tokens; of an answer in one piece, amid it
  exit_at_chunk: N              ends the process there
  garbage: true                 answers bytes that are no HTTP
  bad_length: true              announces more bytes than it sends, then closes
  close_idle_connections: true  closes after an answer that does not say so
  slow_health: SECONDS          delays GET /health
  hand_nothing_over: true       answers prefill legs without kv_transfer_params
"times": N ends each after N uses. "path": PATH has them happen there, instead of where a model is used."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the flags; exits on ones that do not fit together."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlane.testing.fake_engine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="The address to listen on.")
    flag("--port", type=int, default=0, help="The port to listen on; 0 takes a free one.")
    flag("--model", action="append", help='A name to serve; may be given several times; "fake" if none is.')
    flag(
        "--words",
        metavar="FILE",
        help="A tokenizer.json of whole words; a token is 4 bytes if it is not given.",
    )
    flag("--max-model-len", type=_positive, default=131072, help="The longest prompt and answer, in tokens.")
    flag(
        "--prefill-tokens-per-second",
        type=_not_negative,
        default=0.0,
        help="How fast prompts are computed, one after the other; 0 is at once.",
    )
    flag("--ttft-ms", type=_not_negative, default=0.0, help="Milliseconds from a prefill to its first token.")
    flag("--itl-ms", type=_not_negative, default=0.0, help="Milliseconds between two tokens of a request.")
    flag("--max-num-seqs", type=_positive, default=256, help="How many requests run; others wait in a queue.")
    flag("--block-size", type=_positive, default=16, help="Tokens of a block of the prefix cache.")
    flag("--cache-blocks", type=_positive, default=65536, help="How many blocks the prefix cache holds.")
    flag("--pairs", choices=FORMS, default="none", help="The form in which prefill and decode legs are told.")
    flag("--engine-id", help="The name that prefill legs answer; host and port if it is not given.")
    flag("--ping-router", metavar="HOST:PORT", help="The router that P2P NCCL pings go to; needs pyzmq.")
    flag("--role", choices=("P", "D"), help="Whether this engine prefills or decodes, for P2P NCCL.")
    flag("--http-address", help="The address that pings name for HTTP; the one listened on if not given.")
    flag("--zmq-address", help="The address that pings and requests' ids name for KV blocks.")
    flag("--ping-seconds", type=_not_negative, default=3.0, help="Seconds between two pings.")
    flag("--kv-events-port", type=_positive, help="The port to publish KV events on; needs pyzmq.")
    flag("--kv-replay-port", type=_positive, help="The port that replays KV events to those who missed some.")
    flag("--kv-events-topic", default="", help="The topic of KV events.")
    flag("--kv-events-maps", action="store_true", help="Events are maps with a type instead of arrays.")
    given = parser.parse_args(arguments)
    if given.ping_router and not (given.role and given.zmq_address):
        parser.error("--ping-router needs --role and --zmq-address")
    if given.ping_router and given.ping_seconds <= 0:
        parser.error("--ping-seconds must be above 0")
    if given.kv_replay_port and not given.kv_events_port:
        parser.error("--kv-replay-port needs --kv-events-port")
    if given.pairs == "p2p-nccl" and not (given.role or given.zmq_address):
        parser.error("--pairs p2p-nccl needs --role or --zmq-address")
    given.model = given.model or ["fake"]
    return given


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number from 0 on")
    return value
