"""Fine-tuning SmolLM2-135M-Instruct, a real pretrained Llama, on Shakespeare at stage 3, then generating.

    torchrun --nproc-per-node 2 examples/finetune_smollm2.py            # all parameters
    torchrun --nproc-per-node 2 examples/finetune_smollm2.py --lora     # adapters only (peft); the rest is frozen

The model is built without values, sharded, and filled from its safetensors files: no rank ever holds all of it. Prints
the loss per token on held-out text before and after, and a sample made by transformers' own generate().
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.fetch import fetch
from examples.gpt_pretrain import evaluate, loss_sum
from examples.start import Place, parser
from examples.texts import Windows, endless, tokenizer_of, tokens

PROMPT = "Enter HAMLET, alone.\n\nHAMLET.\n"


def build(folder: Path, lora: bool, rank: int) -> nn.Module:
    """The model on the meta device, without values; with LoRA its adapters too."""
    with zeor.on_meta():
        model: nn.Module = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    return model


def fill(model: nn.Module, folder: Path, lora: bool, seed: int) -> None:
    """Read the pretrained values, each rank its own slices only. With LoRA, initialise what the files do not hold."""
    if not lora:
        zeor.load_pretrained(model, folder)
        return
    # peft's names for the pretrained parameters are the files' with a prefix, and `base_layer` inside.
    names = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name, _ in model.named_parameters()
    }
    zeor.load_pretrained(model, folder, strict=False, rename=names.__getitem__)
    second = {module for name, module in model.named_modules() if ".lora_B." in name}

    def init(module: nn.Module) -> None:
        if module in second:
            nn.init.zeros_(module.weight)  # so that adapters change nothing at first

    zeor.init_parameters(model, seed=seed, init=init, missing_only=True)


@torch.no_grad()
def sample(model: nn.Module, tokenizer, place: Place, length: int = 60) -> str:
    """A continuation of the prompt, drawn alike on all ranks: they gather the model together for every token."""
    model.eval()
    torch.manual_seed(1)
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids], device=place.device)
    made = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, min_new_tokens=length,
        do_sample=True, top_p=0.9, temperature=0.8, pad_token_id=2,
    )  # fmt: skip
    model.train()
    return tokenizer.decode(made[0].tolist())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches, options, place: Place) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], options.steps, pct_start=0.1
    )
    for step in range(1, options.steps + 1):
        rows: Tensor = next(batches)
        loss = loss_sum(model, rows) / rows[:, 1:].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        place.progress(step, options.steps, loss, norm)


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--lora", action="store_true", help="train adapters only")
    asked.add_argument("--lora-rank", type=int, default=16)
    asked.add_argument("--steps", type=int, default=300)
    asked.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    asked.add_argument("--context", type=int, default=256)
    asked.add_argument("--lr", type=float, help="1e-4, or 1e-3 with --lora")
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--precision", help="bf16 on a GPU unless said otherwise")
    asked.add_argument("--limit", type=int, help="take so many works only")
    asked.add_argument("--windows", type=int, help="evaluate on so many windows of held-out text only")
    asked.add_argument("--tokens", type=int, default=60, help="tokens to generate")
    options = asked.parse_args()
    folder = fetch("smollm2")  # before the process group: once there is one, transformers saves on rank 0 alone
    place = Place(options.seed)

    tokenizer = tokenizer_of(folder)
    seen, held_out = tokens(["shakespeare"], tokenizer, options.limit)
    precision = options.precision or ("bf16" if place.device.type == "cuda" else "fp32")
    model = build(folder, options.lora, options.lora_rank)
    # peft's generate() calls the model inside the adapters' wrapper: a second way in, besides the root's forward.
    ways_in = ("base_model.model.forward",) if options.lora else ()
    model = zeor.shard(model, stage=options.stage, precision=precision, device=place.device, methods=ways_in)
    fill(model, folder, options.lora, options.seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    lr = options.lr or (1e-3 if options.lora else 1e-4)
    model, optimizer = zeor.shard(model, torch.optim.AdamW(trained, lr=lr, weight_decay=0.0))
    counts = [sum(param.numel() for param in params) for params in (trained, model.parameters())]
    place.say(f"trained: {counts[0]:,} of {counts[1]:,} parameters")

    windows = Windows(seen, options.context + 1, place.device)
    unseen = Windows(held_out, options.context + 1, place.device)
    unseen.rows = unseen.rows[: options.windows]
    batches = endless(zeor.data.shard(windows.loader(options.batch)))
    before = evaluate(model, unseen, place, options.batch)
    train(model, optimizer, batches, options, place)
    after = evaluate(model, unseen, place, options.batch)
    place.say(f"held-out loss {before:.3f} -> {after:.3f}")
    text = sample(model, tokenizer, place, options.tokens)
    place.say(f"--- a sample\n{text}\n---")
    place.end(options, example="finetune_smollm2", loss_before=before, loss=after, sample=text)


if __name__ == "__main__":
    main()
