"""Runs what docs/plain-loops.md prints, block by block, at two ranks with zeor or in one process without it.

`main(["two" or "one", folder, tool, ...])`. Without zeor the very same lines run with a stand-in in its place, whose
verbs do nothing, on the joint batch. After a block `AFTER[tool]` looks at what the block has left behind: the loss of a
batch that it never saw, and files as plain tools read them.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeor
from tests.integrations import tiny
from tests.integrations.launching import ROOT, run

PAGE = ROOT / "docs" / "plain-loops.md"
STAGES, JOINT, STEPS, SAMPLES = (1, 3), 4, 4, 6
Found = dict[str, Any]


def blocks(heading: str) -> list[str]:
    """The Python blocks of a section, in order."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    assert section is not None, heading
    return re.findall(r"^```python\n(.*?)^```$", section.group(1), re.M | re.S)


class Average:
    """zeor.ema where nothing is sharded: torch's own."""

    def __init__(self, model: Any, decay: float):
        self.model, self.average = model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(self) -> None:
        self.average.update_parameters(self.model)

    @contextlib.contextmanager
    def applied(self) -> Any:
        kept = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.average.module.state_dict())
        yield
        self.model.load_state_dict(kept)


WITHOUT = SimpleNamespace(
    shard=lambda model, optimizer=None, **options: model if optimizer is None else (model, optimizer),
    full_params=lambda model, **options: contextlib.nullcontext(),
    iter_full=lambda model: ((name, param.detach()) for name, param in model.named_parameters()),
    total=lambda *numbers: numbers,
    ema=Average,
)


class Place:
    """Which rank of how many runs a block, with zeor at a stage or without it (stage None), and where it may write."""

    def __init__(self, folder: str, stage: int | None):
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.stage, self.folder = stage, f"{folder}/{stage}"
        Path(self.folder).mkdir(parents=True, exist_ok=True)

    def own(self, rows: Any) -> Any:
        """This rank's part of a joint batch."""
        return rows[self.rank :: self.world]

    def names(self, model: Any = None) -> Found:
        """What the page says comes before every block."""
        known = {"copy": copy, "os": os, "torch": torch, "rank": self.rank, "world": self.world, "stage": self.stage}
        return {
            **known, "zeor": WITHOUT if self.stage is None else zeor, "folder": self.folder,
            "model": tiny.llama() if model is None else model, "batches": self.texts(), "pictures": self.pictures(),
        }  # fmt: skip

    def texts(self) -> list[dict[str, Tensor]]:
        rows = tiny.samples(JOINT * STEPS)
        return [tiny.stack(self.own(rows[step * JOINT : (step + 1) * JOINT])) for step in range(STEPS)]

    def pictures(self) -> Any:
        return None

    def execute(self, code: str, names: Found) -> Found:
        torch.manual_seed(7)
        exec(compile(code, str(PAGE), "exec"), names)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return names


def unseen() -> dict[str, Tensor]:
    return tiny.stack(tiny.samples(JOINT * STEPS + SAMPLES)[-SAMPLES:])


@torch.no_grad()
def judged(model: Any) -> float:
    return float(model.eval()(**unseen()).loss)


def tqdm(place: Place) -> Found:
    names = place.execute(blocks("tqdm")[0], place.names())
    return {"loss": judged(names["model"]), "shown": names["shown"].n}


def eight_bits(block: int) -> Callable[[Place], Found]:
    """Both packages keep 8 bits of 4,096 elements or more, torchao in whole rows of 256 only: here of the projections,
    and of what a rank has of them. The embedding is too small in one process too. In 8 bits it alone changes torchao's
    loss by 0.7%, and of a larger one each of two slices would be too small: two kinds of state would be compared."""

    def check(place: Place) -> Found:
        model = tiny.llama(hidden_size=64, intermediate_size=512)
        names = place.execute(blocks("Optimizers with 8-bit states")[block], place.names(model))
        kept = [value for state in names["optimizer"].state.values() for value in state.values()]
        narrow = [value for value in kept if isinstance(value, Tensor) and value.dim()]
        narrow = [value for value in narrow if value.dtype == torch.uint8 or type(value) is not Tensor]
        return {"loss": judged(names["model"]), "narrow": len(narrow)}

    return check


# ---- what is looked at beside


def peft(place: Place) -> Found:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    training, loading = blocks("peft")
    trained = place.execute(training, place.names())["model"]
    found = {"loss": judged(trained), "files": sorted(each.name for each in Path(place.folder, "adapter").iterdir())}
    found["merged"] = judged(AutoModelForCausalLM.from_pretrained(f"{place.folder}/merged"))
    found["plain"] = judged(PeftModel.from_pretrained(tiny.llama(), f"{place.folder}/adapter"))
    loaded = place.execute(loading, place.names())["model"]
    found["loaded"] = judged(loaded)
    if place.stage is not None:  # into a sharded model whose adapter has other values
        with torch.no_grad(), zeor.full_params(loaded, write=True):
            for param in loaded.parameters():
                if param.requires_grad:
                    param.add_(1.0)
        found["changed"] = judged(loaded)
        last = loading.strip().splitlines()[-1]
        assert last.startswith("set_peft_model_state_dict")
        imports = loading.strip().splitlines()[0]
        place.execute(f"{imports}\n{last}", {**place.names(), "model": loaded})
        found["put in place"] = judged(loaded)
    return found


def schedulefree(place: Place) -> Found:
    names = place.execute(blocks("schedulefree")[0], place.names())
    averaged = judged(names["model"])
    names["optimizer"].train()
    return {"loss": averaged, "trained": judged(names["model"])}


def torchmetrics(place: Place) -> Found:
    names = place.execute(blocks("torchmetrics")[0], place.names())
    return {"loss": judged(names["model"]), "perplexity": float(names["found"])}


def tensorboard(place: Place) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = place.execute(blocks("TensorBoard")[0], place.names())
    if names["writer"] is not None:
        names["writer"].close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    read = EventAccumulator(f"{place.folder}/runs")
    read.Reload()
    found: Found = {name: [each.value for each in read.Scalars(name)] for name in ("loss", "norm")}
    weights = {name: read.Histograms(name)[0].histogram_value for name in sorted(read.Tags()["histograms"])}
    found["histograms"] = {name: [each.num, each.sum_squares] for name, each in weights.items()}
    found["files"] = len(list(Path(place.folder, "runs").iterdir()))
    return {"curve": found.pop("loss"), "loss": judged(names["model"]), **found}


def wandb(place: Place) -> Found:
    names = place.execute(blocks("Weights & Biases")[0], place.names())
    files = list(Path(place.folder).rglob("*.wandb"))
    logged = [entry for file in files for entry in histories(file.read_bytes())]
    found = {name: [float(entry[name]) for entry in logged] for name in ("loss", "norm")}
    return {"curve": found["loss"], "norm": found["norm"], "loss": judged(names["model"]), "files": len(files)}


def histories(data: bytes) -> Iterator[dict[str, str]]:
    """What was logged, out of an offline run's file: records in blocks of 32 KiB, as LevelDB frames its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, frame, at, held = 32768, struct.Struct("<IHB"), 7, b""
    while at + frame.size <= len(data):
        if block - at % block < frame.size:  # what is left of a block has no room for a record
            at += block - at % block
            continue
        _, length, kind = frame.unpack_from(data, at)
        at += frame.size + length
        held += data[at - length : at]
        if kind in (1, 4):  # whole, or the last of its parts
            record = Record()
            record.ParseFromString(held)
            held = b""
            if record.HasField("history"):
                yield {each.key or ".".join(each.nested_key): each.value_json for each in record.history.item}


class Pictures(Place):
    """Batches of pictures: what timm and diffusers are given."""

    def __init__(self, place: Place, kind: str):
        self.__dict__.update(place.__dict__)
        self.kind = kind

    def pictures(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        found = []
        for _ in range(STEPS):
            if self.kind == "timm":
                joint = (torch.randn(JOINT, 3, 32, 32, generator=generator), torch.arange(JOINT))
            else:
                images, noise = (torch.randn(JOINT, 1, 8, 8, generator=generator) for _ in range(2))
                joint = (images, noise, torch.randint(0, 100, (JOINT,), generator=generator))
            found.append(tuple(self.own(each) for each in joint))
        return found


def shimmed() -> None:
    """Where torchvision is installed (timm needs it) in its build for GPUs and torch is without them, its operators
    cannot be loaded, and neither timm nor transformers can be imported. Two names of operators are enough for both."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                       "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
            library.define(schema)
        shimmed.library = library  # type: ignore[attr-defined]  # it unregisters when it is freed


def timm(place: Place) -> Found:
    names = Pictures(place, "timm").execute(blocks("timm")[0], Pictures(place, "timm").names(torch.nn.Identity()))
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        now = names["model"].eval()(image)
        with names["average"].applied():
            averaged = names["model"](image)
    return {"loss": float(now.square().mean()), "averaged": float(averaged.square().mean())}


def diffusers(place: Place) -> Found:
    from diffusers import DDPMPipeline, UNet2DModel

    at = Pictures(place, "diffusers")
    names = at.execute(blocks("diffusers")[0], at.names(torch.nn.Identity()))

    def sampled(model: Any) -> float:
        pipeline = DDPMPipeline(unet=model, scheduler=copy.deepcopy(names["noises"]))
        pipeline.set_progress_bar_config(disable=True)
        drawn = pipeline(batch_size=2, num_inference_steps=3, output_type="np",
                         generator=torch.Generator().manual_seed(3)).images  # fmt: skip
        return float((drawn.astype("float64") ** 2).mean())

    loaded = UNet2DModel.from_pretrained(f"{place.folder}/unet")
    return {"loss": sampled(names["model"].eval()), "loaded": sampled(loaded.eval())}


def encoder_of(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer, models
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, tiny.VOCABULARY)}}
    tokenizer = Tokenizer(kinds.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = BertConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    where = f"{folder}/encoder-{os.environ.get('RANK', '0')}"
    if not Path(where).is_dir():  # at the first stage; in a process group transformers saves on rank 0 alone
        BertModel(config).save_pretrained(where)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(where)
    inner = models.Transformer(where)
    return SentenceTransformer(modules=[inner, models.Pooling(config.hidden_size)], device="cpu")


def sentences(place: Place) -> Found:
    def text(number: int) -> str:
        return " ".join(f"w{2 + (number * 5 + at * at * 3) % (tiny.VOCABULARY - 2)}" for at in range(4))

    pairs = []
    for step in range(STEPS):
        rows = place.own([(text(2 * (step * JOINT + at)), text(2 * (step * JOINT + at) + 1)) for at in range(JOINT)])
        pairs.append(tuple(map(list, zip(*rows, strict=True))))
    names = {**place.names(torch.nn.Identity()), "encoder": encoder_of(str(Path(place.folder).parent)), "pairs": pairs}
    names = place.execute(blocks("sentence-transformers")[0], names)
    with torch.no_grad():
        vectors = names["encoder"].encode([text(number) for number in range(3)], convert_to_tensor=True)
    return {"loss": float((vectors[0] * vectors[1]).sum()), "other": float((vectors[0] * vectors[2]).sum())}


AFTER: dict[str, Callable[[Place], Found]] = {
    "peft": peft,
    "bitsandbytes": eight_bits(0),
    "torchao": eight_bits(1),
    "schedulefree": schedulefree,
    "tqdm": tqdm,
    "timm": timm,
    "diffusers": diffusers,
    "sentence_transformers": sentences,
    "torchmetrics": torchmetrics,
    "tensorboard": tensorboard,
    "wandb": wandb,
}


def main(arguments: Sequence[str]) -> Any:
    what, folder, *tools = arguments
    shimmed()
    found: Found = {}
    for tool in tools:
        for stage in STAGES if what == "two" else (None,):
            place = Place(f"{folder}/{what}/{tool}", stage)
            # torchao compiles its step: eager is the same arithmetic and takes no seconds for each shape.
            with torch.compiler.set_stance("force_eager"):
                found[f"{tool} {stage}" if stage is not None else tool] = AFTER[tool](place)
    return found


if __name__ == "__main__":
    run(main)
