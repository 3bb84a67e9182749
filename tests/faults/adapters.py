"""Random LoRA adapters for the test model, strong enough that their texts differ."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTERS = ("adapter-a", "adapter-b")
_RANK = 8


def ensure_adapters(model_dir: Path) -> dict[str, Path]:
    """The folder of each adapter, made when it is missing."""
    root = Path(__file__).parents[2] / ".cache" / "adapters"
    folders = {name: root / name for name in ADAPTERS}
    for seed, folder in enumerate(folders.values(), start=1):
        if not (folder / "adapter_config.json").exists():
            _make(folder, json.loads((model_dir / "config.json").read_text()), seed)
    return folders


def _make(folder: Path, config: dict[str, int], seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = 0.05 * torch.randn(_RANK, hidden, generator=generator)
            tensors[f"{key}.lora_B.weight"] = 0.05 * torch.randn(width, _RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": sorted(widths), "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "test", "lora_dropout": 0.0,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
