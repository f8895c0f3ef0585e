"""Small checkpoints with every dtype, made by the safetensors package, and comparisons as bytes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def noise(shape, dtype, seed):
    """A tensor of random bytes (of truth values for bool)."""
    g = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=g).bool()
    width = torch.empty((), dtype=kind).element_size()
    count = int(torch.tensor(shape, dtype=torch.int64).prod()) if shape else 1
    return torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=g).view(kind).reshape(shape)


def tensors():
    """A transformer layer of 5 heads of 4, an odd vocabulary, and a tensor of every dtype."""
    made = {f"extra.{d}": noise((5, 3), d, k) for k, d in enumerate(DTYPES)}
    made |= {"extra.scalar": noise((), "int64", 90), "extra.none": noise((0, 3), "bfloat16", 91)}
    made["embed_tokens.weight"] = noise((13, 20), "bfloat16", 92)
    for k, part in enumerate("qkv"):
        made[f"layer.0.self_attn.{part}_proj.weight"] = noise((20 if part == "q" else 8, 20), "bfloat16", k)
    made["layer.0.self_attn.o_proj.weight"] = noise((20, 20), "bfloat16", 93)
    return made


def write_plain(folder: Path, config=True) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps({"hidden_size": 20, "num_attention_heads": 5}))
    return folder


def write_sharded(folder: Path) -> Path:
    """The same in two files with an index."""
    folder.mkdir()
    names = sorted(tensors())
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, its in halves.items():
        save_file({n: tensors()[n] for n in its}, folder / file)
    index = {"metadata": {}, "weight_map": {n: f for f, its in halves.items() for n in its}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"head_dim": 4}))
    return folder


def raw(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, x in wanted.items():
        y = found[name]
        assert (y.dtype, y.shape) == (x.dtype, x.shape), name
        assert torch.equal(raw(y), raw(x)), name


def read_plain(path: Path):
    """All tensors of a plain checkpoint, read by the safetensors package."""
    return {n: t for file in sorted(path.glob("*.safetensors")) for n, t in load_file(file).items()}
