"""`zeor plan --gpu`: which plan is the fastest that fits, by zeor.choose, for a machine that need not be here.

    zeor plan --model ./llama-config --gpu H100 --ranks 64 --batch 4 8192     # a Hugging Face folder with config.json
    zeor plan --model train:build --gpu 80GiB --batch 8 2048 --host 512GiB    # a function of yours that makes the model
    zeor plan --size 7b --gpu H200 --batch 4 2048                             # a built-in size

The model is built on the meta device, so its size does not matter. A folder's weights are not looked at, and no code in
it is run; `module:function` is code of yours, and is run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeor
from zeor.planner.plans import ALLOWED

CONFIG = "config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the fastest plan that fits (with --gpu)").add_argument
    add("--gpu", metavar="NAME", help='a GPU such as "H100", or its memory such as "80GiB": rank all plans for it')
    add("--model", metavar="WHAT", help="a Hugging Face folder, or module:function (default: --size)")
    add("--ranks", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--host", metavar="BYTES", help="memory of one host for state that does not fit on GPUs, such as 512GiB")
    add("--link", metavar="RATE", help='between hosts, such as "400Gbit/s" or "400Gbit/s 14us" (default: the GPU\'s)')
    add("--allow", nargs="+", default=(), metavar="WHAT", choices=ALLOWED,
        help=f"what changes results or loops, and may be tried all the same: {', '.join(ALLOWED)}")  # fmt: skip


def run(options: argparse.Namespace, built_in: Callable[[], nn.Module]) -> int:
    if options.batch is None:
        raise ValueError("plans are ranked by the time of a step: give --batch SEQUENCES TOKENS, of one rank and step.")
    chosen = zeor.choose(
        built_in if options.model is None else factory(options.model), options.optimizer, tuple(options.batch),
        world=options.ranks, gpu=options.gpu, host=options.host, link=options.link,
        precision=options.precision or "bf16", allow=options.allow,
    )  # fmt: skip
    print(chosen)
    given = [f"{name}={_as_code(value)}" for name, value in chosen.options.items() if value not in (False, "exact")]
    print(f"\nzeor.shard(model, optimizer, {', '.join(given)})")
    if chosen.accumulation > 1:
        print(f"with {chosen.accumulation} micro-batches of {options.batch[0] // chosen.accumulation} sequences each")
    return 0


def _as_code(value: Any) -> str:
    """As a user would write it: of a zeor.Offload what differs from its defaults."""
    if not isinstance(value, zeor.Offload):
        return repr(value)
    plain = zeor.Offload.parse({"auto": value.auto})
    changed = {name: each for name, each in vars(value).items() if each != getattr(plain, name)}
    told = [f"{name}={_tier(each)!r}" for name, each in changed.items()]
    return f"zeor.Offload({', '.join([*['auto=True'] * value.auto, *told])})"


def _tier(value: Any) -> Any:
    """One tier for all of a role is written by its name."""
    return value[0][0] if isinstance(value, tuple) and len(value) == 1 and value[0][1] == 1.0 else value


def factory(what: str) -> Callable[[], nn.Module]:
    """What makes the model: called where tensors have no values."""
    if Path(what).is_dir() or what.endswith(CONFIG):
        return lambda: _from_config(Path(what))
    module, colon, name = what.partition(":")
    if not colon:
        raise ValueError(f"--model {what!r} is no folder; give one with a {CONFIG}, or module:function.")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise ValueError(f"--model {what!r}: there is no module {module!r} here.") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise ValueError(f"--model {what!r}: the module has no function {name!r}.")
    return lambda: _checked(found(), what)


def _checked(made: Any, what: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {what!r} gave a {type(made).__name__}; it must return a torch.nn.Module.")
    return made


def _from_config(path: Path) -> nn.Module:
    """By transformers, which knows the class; on the meta device."""
    try:
        import transformers
    except ImportError:
        raise ValueError("--model of a Hugging Face folder needs transformers: pip install transformers.") from None
    folder = path.parent if path.name == CONFIG else path
    if not (folder / CONFIG).exists():
        raise ValueError(f"there is no {CONFIG} in {str(folder)!r}; give a Hugging Face folder, or module:function.")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.use_cache = False
    named: Any = next((getattr(transformers, each, None) for each in config.architectures or ()), None)
    with torch.device("meta"):
        if named is not None:
            return _checked(named(config), str(folder))
        return _checked(transformers.AutoModelForCausalLM.from_config(config), str(folder))
