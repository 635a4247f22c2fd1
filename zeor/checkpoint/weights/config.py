"""The config.json beside exported weights: a transformers model's own, or copied from where the user says.

transformers is never imported: a config is whatever has a `to_json_string()`. Only text comes out of this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

NAME, GENERATION = "config.json", "generation_config.json"


def config_texts(model: Any, given: Any, dtypes: Iterable[torch.dtype]) -> dict[str, str]:
    """File names and their texts: `given` (a folder, a config.json, or a config object), else what the model has.

    dtypes: of the exported parameters; where it is one, the config says so, as transformers loads by it."""
    texts: dict[str, str] = {}
    if isinstance(given, (str, os.PathLike)):
        texts = _copied(Path(given))
    else:
        for name, config in ((NAME, given or getattr(model, "config", None)), (GENERATION, _generation(model))):
            text = _text_of(config)
            if text:
                texts[name] = text
        if given is not None and NAME not in texts:
            raise ValueError(
                f"config={type(given).__name__} is no config; give a folder with a {NAME}, that file, or a config with "
                "to_json_string()."
            )
    if NAME in texts:
        texts[NAME] = _adjusted(texts[NAME], model, set(dtypes), copied=isinstance(given, (str, os.PathLike)))
    return texts


def _generation(model: Any) -> Any:
    return getattr(model, "generation_config", None) if model is not None else None


def _copied(path: Path) -> dict[str, str]:
    file = path
    try:
        folder = path if path.is_dir() else path.parent
        file = folder / NAME if folder is path else path
        texts = {NAME: file.read_text()}
        if (folder / GENERATION).is_file():
            texts[GENERATION] = (folder / GENERATION).read_text()
        if not isinstance(json.loads(texts[NAME]), dict):
            raise ValueError
    except OSError as error:
        raise ValueError(f"config={str(path)!r}: {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {file} is not a JSON object.") from error
    return texts


def _text_of(config: Any) -> str:
    if hasattr(config, "to_json_string"):
        return config.to_json_string()
    if isinstance(config, dict):
        try:
            return json.dumps(config, indent=2) + "\n"
        except (TypeError, ValueError):
            return ""
    return ""


def _adjusted(text: str, model: Any, dtypes: set[torch.dtype], copied: bool) -> str:
    """Architecture and dtype, as save_pretrained writes them; in a copied file only what it says already."""
    config = json.loads(text)
    if not isinstance(config, dict) or ("model_type" not in config and "architectures" not in config):
        return text  # not transformers': it says what its owner meant
    floating = {str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point}
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if len(floating) == 1 and (not copied or key in config):
        config[key] = floating.pop()
    if model is not None and not copied:
        config["architectures"] = [type(model).__name__]
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
