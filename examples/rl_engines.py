"""zeor.push to vLLM and to SGLang: what `send` is for each. NEVER RUN: no machine with a GPU and an engine was at hand.

The names are those of the engines' documentation (vLLM 0.29's weight transfer and worker extensions, SGLang 0.5's
update_weights_from_tensor); look them up for the version that you have. engine.py is a stand-in that was run.

    send = vllm_in_this_process(llm)            # one LLM beside each trainer: zeor.push(..., to="all")
    send = vllm_over_nccl(llm, group)           # an engine on other GPUs
    send = sglang_in_this_process(engine)       # beside the trainer, by CUDA IPC
    zeor.push(model, send, dtype=torch.bfloat16)

An engine takes names as they stand in checkpoints, which are those of transformers' models but for some (experts that
transformers keeps fused). Drop its prefix cache after a push: it was computed with other weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

from examples.engine import described, views

Send = Callable[[Any], None]  # of a zeor.access.push.Bucket


def vllm_in_this_process(llm: Any) -> Send:
    """An LLM made with distributed_executor_backend="external_launcher", one for each rank."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner

    def send(bucket: Any) -> None:
        runner.model.load_weights(bucket.tensors)  # copies
        if bucket.last:
            llm.reset_prefix_cache()

    return send


class WorkerExtension:
    """worker_extension_cls="examples.rl_engines.WorkerExtension" of an LLM: its workers receive a bucket as one tensor.
    `self.group` is the communicator that the extension's user has opened between trainer and workers."""

    group: Any
    device: torch.device
    model_runner: Any

    def take_bucket(self, named: list[tuple[str, str, list[int], int]], nbytes: int) -> None:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        self.model_runner.model.load_weights(views(flat, named))


def vllm_over_nccl(llm: Any, group: Any) -> Send:
    """Its workers have the extension above; `group` is the trainer's end of their communicator."""

    def send(bucket: Any) -> None:
        done = llm.collective_rpc.remote("take_bucket", args=(described(bucket), bucket.flat.nbytes))  # a Ray actor
        group.broadcast(bucket.flat, src=0, stream=torch.cuda.current_stream())
        done_by_all(done)  # the bucket's memory is used again when send returns

    return send


def sglang_in_this_process(engine: Any) -> Send:
    """An sglang.Engine beside the trainer. It answers before its own copies are done, so it is given copies."""

    def send(bucket: Any) -> None:
        own = [(name, tensor.clone()) for name, tensor in bucket.tensors]
        engine.update_weights_from_tensor(own, flush_cache=bucket.last)

    return send


def done_by_all(answer: Any) -> None:
    import ray

    ray.get(answer)
