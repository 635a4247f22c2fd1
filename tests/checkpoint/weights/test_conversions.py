"""Models that transformers converts while it loads them: the same values and the same files as its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zeor
from zeor.checkpoint.weights import conversions

SMALL = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=3, num_experts_per_tok=2))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **sizes, head_dim=4, mlp_only_layers=[0]))


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes: dict[str, Any] = {
        "intermediate_size": 24, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_shared_experts": 1,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **sizes))


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    text = {**SMALL, "intermediate_size": 24, "rope_parameters": rope, "tie_word_embeddings": True}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    ids = {"vision_start_token_id": 50, "vision_end_token_id": 51, "image_token_id": 52, "video_token_id": 53}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "qwen2_vl": qwen2_vl,
}  # fmt: skip


def made(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = KINDS[kind]()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def held(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def there_and_back(kind: str, given: str, out: str, stage: int, on_meta: bool) -> None:
    """On every rank: load, compare with the model that was saved, export."""
    wanted = made(kind, seed=0).state_dict()
    if on_meta:
        with zeor.on_meta():
            model = KINDS[kind]()
    else:
        model = made(kind, seed=1)
    model = zeor.shard(model, stage=stage)
    assert zeor.load_pretrained(model, given) == ([], [])
    found = dict(zeor.iter_full(model, buffers=True))
    assert set(dict(model.named_parameters())) <= set(found)
    for name in wanted.keys() & found.keys():
        assert torch.equal(found[name], wanted[name]), name
    zeor.export(model, out)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("world", [1, 2])
def test_files_of_transformers_are_loaded_and_written_as_it_does(
    ranks: Any, tmp_path: Path, kind: str, world: int
) -> None:
    plain = made(kind, seed=0)
    plain.save_pretrained(tmp_path / "theirs")
    out = tmp_path / "ours"
    ranks(there_and_back, world, kind, str(tmp_path / "theirs"), str(out), 3, world == 2)
    equal(held(out), held(tmp_path / "theirs"))
    again, report = type(plain).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    equal(again.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_model_that_was_never_loaded_is_written_as_save_pretrained_writes_it(tmp_path: Path, kind: str) -> None:
    model = made(kind, seed=2)
    model.save_pretrained(tmp_path / "theirs")
    zeor.export(model, tmp_path / "ours")
    equal(held(tmp_path / "ours"), held(tmp_path / "theirs"))
    if kind != "qwen2_vl":
        names = held(tmp_path / "ours")
        assert any(".experts.1." in name for name in names) and not any("gate_up_proj" in name for name in names)
    zeor.load_pretrained(plain := made(kind, seed=3), tmp_path / "ours")
    equal(plain.state_dict(), model.state_dict())


def test_files_with_the_models_own_names_still_load(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = made("mixtral", seed=0)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert any("gate_up_proj" in name for name in held(tmp_path))
    zeor.load_pretrained(other := made("mixtral", seed=1), tmp_path)
    equal(other.state_dict(), model.state_dict())


def test_experts_that_are_missing_are_a_sentence(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made("mixtral", seed=0).save_pretrained(tmp_path / "theirs")
    tensors = held(tmp_path / "theirs")
    lost = next(name for name in tensors if ".experts.1." in name)
    (tmp_path / "less").mkdir()
    save_file({n: v for n, v in tensors.items() if n != lost}, tmp_path / "less" / "model.safetensors")
    with pytest.raises(ValueError, match=r"transformers cannot make 'model\..*experts.gate_up_proj' of the 5 tensors"):
        zeor.load_pretrained(made("mixtral", seed=1), tmp_path / "less")


def test_a_dtype_is_cast_before_experts_are_taken_apart(tmp_path: Path) -> None:
    model = made("mixtral", seed=0)
    zeor.export(model, tmp_path / "ours", dtype="bf16")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours, theirs = held(tmp_path / "ours"), held(tmp_path / "theirs")
    assert sorted(ours) == sorted(theirs) and {value.dtype for value in ours.values()} == {torch.bfloat16}
    for name, value in theirs.items():
        assert torch.allclose(ours[name].float(), value.float(), rtol=2**-7), name


def parts_read(given: str) -> tuple[list[int], int]:
    """Bytes of every expert stack that was converted at a time, and what a rank read in all."""
    sizes: list[int] = []
    convert, reads = conversions.Converted._made, []

    def watched(self: Any, read: Any, part: slice) -> Any:
        found = convert(self, read, part)
        sizes.extend(value.nbytes for value in map(conversions._one, found.values()) if not value.is_meta)
        return found

    fill = conversions.Reader._fill

    def counted(self: Any, entry: Any, position: int, raw: Tensor) -> None:
        reads.append(raw.numel())
        fill(self, entry, position, raw)

    conversions._PART_NBYTES = 1
    conversions.Converted._made, conversions.Reader._fill = watched, counted  # type: ignore[method-assign]
    try:
        with zeor.on_meta():
            model = mixtral()
        zeor.load_pretrained(zeor.shard(model, stage=3), given)
    finally:
        conversions.Converted._made, conversions.Reader._fill = convert, fill  # type: ignore[method-assign]
        conversions._PART_NBYTES = 64 << 20
    return sizes, sum(reads)


def test_a_rank_reads_and_converts_its_own_experts_one_at_a_time(ranks: Any, tmp_path: Path) -> None:
    made("mixtral", seed=0).save_pretrained(tmp_path)
    total = sum(value.nbytes for value in held(tmp_path).values())
    for sizes, read in ranks(parts_read, 2, str(tmp_path)):
        assert sizes and max(sizes) == 2 * 24 * 16 * 4, "one expert's gate and up, of three"
        assert read < 0.75 * total
