"""A stand-in for an inference engine: a process of its own that is given weights over a socket, and generates.

    with start("folder of a transformers model") as engine:
        zeor.push(model, engine.send)                      # every rank; rank 0 sends
        engine.generate(ids, max_new_tokens=32)            # by the process that started it

It speaks to one client, over loopback, in lines of JSON; behind a line that brings weights come their bytes. The
process knows torch and transformers and nothing of zeor. vLLM and SGLang take the same buckets: rl_engines.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]


class Weights(dict[str, Tensor]):
    """What it was given, by name: a receiver that keeps tensors and runs no model."""

    def take(self, name: str, value: Tensor) -> None:
        self[name] = value.clone()

    def all(self) -> dict[str, Tensor]:
        return dict(self)


class Runner:
    """A plain transformers model."""

    def __init__(self, folder: str):
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._own: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    @torch.no_grad()
    def take(self, name: str, value: Tensor) -> None:
        self._own[name].copy_(value)  # KeyError: not this model's

    def all(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def generate(self, ids: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
        """New tokens of each prompt. Prompts of unequal lengths are padded in front."""
        pad = self.model.generation_config.pad_token_id or 0
        longest = max(map(len, ids))
        padded = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        if "seed" in options:
            torch.manual_seed(options.pop("seed"))
        made = self.model.generate(input_ids=padded, attention_mask=mask, pad_token_id=pad, **options)
        return [_ended(row[longest:].tolist(), self.model.generation_config.eos_token_id) for row in made]


def _ended(tokens: list[int], eos: int | list[int] | None) -> list[int]:
    """Up to the first end of a text, which stays."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def described(bucket: Any) -> list[tuple[str, str, list[int], int]]:
    """(name, dtype, shape, first byte) of each tensor, as can be sent in a message."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes]
    return list(zip(bucket.names, dtypes, map(list, bucket.shapes), bucket.offsets))


def views(flat: Tensor, named: list[tuple[str, str, list[int], int]]) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket on the other side."""
    found = []
    for name, dtype, shape, begin in named:
        kind = getattr(torch, dtype)
        end = begin + kind.itemsize * torch.Size(shape).numel()
        found.append((name, flat[begin:end].view(kind).view(shape)))
    return found


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each."""
    return {name: hashlib.sha256(_bytes(value)).hexdigest() for name, value in sorted(tensors.items())}


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ---- the process


def serve(held: Any, stream: BinaryIO) -> None:
    """Answer until the client has gone."""
    while line := stream.readline():
        asked = json.loads(line)
        try:
            answer = {"answer": _answer(held, asked, stream)}
        except Exception as error:  # the client is told; the process lives on
            answer = {"error": f"{type(error).__name__}: {error}"}
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()


def _answer(held: Any, asked: dict[str, Any], stream: BinaryIO) -> Any:
    if asked["do"] == "take":
        flat = torch.frombuffer(bytearray(stream.read(asked["nbytes"])), dtype=torch.uint8)
        for name, value in views(flat, asked["tensors"]):
            held.take(name, value)
        return None
    if asked["do"] == "generate":
        return held.generate(asked["ids"], asked["options"])
    if asked["do"] == "digests":
        return digests(held.all())
    raise ValueError(f"there is no {asked['do']!r}")


# ---- its client


class Engine:
    def __init__(self, stream: BinaryIO):
        self._stream = stream

    def send(self, bucket: Any) -> None:
        """A bucket of zeor.push."""
        flat = _bytes(bucket.flat)
        self._ask({"do": "take", "tensors": described(bucket), "nbytes": len(flat)}, flat)

    def generate(self, ids: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """New tokens of each prompt; `options` are transformers', and seed=."""
        found: list[list[int]] = self._ask({"do": "generate", "ids": [list(row) for row in ids], "options": options})
        return found

    def digests(self) -> dict[str, str]:
        found: dict[str, str] = self._ask({"do": "digests"})
        return found

    def _ask(self, what: dict[str, Any], data: bytes = b"") -> Any:
        self._stream.write(json.dumps(what).encode() + b"\n" + data)
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError("The engine's process has ended.")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"The engine said: {answer['error']}")
        return answer["answer"]


@contextlib.contextmanager
def start(folder: str = "", threads: int = 1) -> Iterator[Engine]:
    """A process with the model of a folder; without one it only keeps what it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-m", "examples.engine", "--port", port, "--threads", str(threads)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        env = {name: value for name, value in os.environ.items() if name not in outer}
        process = subprocess.Popen([*command, "--folder", folder], env={**env, "PYTHONPATH": path}, cwd=ROOT)
        try:
            server.settimeout(300)
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as stream:
                connection.settimeout(None)
                yield Engine(stream)  # type: ignore[arg-type]  # a BufferedRWPair is no BinaryIO to mypy
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", default="")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held = Runner(options.folder) if options.folder else Weights()
    with socket.create_connection(("127.0.0.1", options.port)) as connection, connection.makefile("rwb") as stream:
        serve(held, stream)  # type: ignore[arg-type]  # as above


if __name__ == "__main__":
    main()
