"""Opening, describing and planning: everything that reads no tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import onelayer
from checkpoints import BITS, FIXTURES, bytes_in_file, write_checkpoint


def test_what_is_in_it(layered: Path) -> None:
    checkpoint = onelayer.open(layered)
    assert checkpoint.keys() == list(checkpoint) == list(bytes_in_file(layered))
    assert len(checkpoint) == 18
    assert "model.norm.weight" in checkpoint
    assert "nothing" not in checkpoint
    assert 1 not in checkpoint
    assert checkpoint.nbytes == 64 * 64 * 4 + 16 * 64 * 128 * 4 + 64 * 4
    assert checkpoint.metadata == {"format": "pt"}
    assert checkpoint.files == [str(layered)]
    assert checkpoint.path == str(layered)
    info = checkpoint.info("model.layers.3.mlp.weight")
    assert info == onelayer.TensorInfo("model.layers.3.mlp.weight", "F32", (64, 128), 64 * 128 * 4, str(layered))
    with pytest.raises(KeyError, match="nothing"):
        checkpoint.info("nothing")


def test_layers_come_in_the_order_of_execution(layered: Path) -> None:
    layers = onelayer.open(layered).layers
    names = [layer.name for layer in layers]
    assert names == [
        "model.embed_tokens",
        *(f"model.layers.{number}" for number in range(8)),
        "model.norm",
    ]
    assert layers[1].keys == ("model.layers.0.mlp.weight", "model.layers.0.attn.weight")
    assert layers[1].nbytes == 2 * 64 * 128 * 4


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_layers_hold_every_tensor_once(name: str) -> None:
    checkpoint = onelayer.open(FIXTURES / name)
    keys = [key for layer in checkpoint.layers for key in layer.keys]
    assert sorted(keys) == sorted(checkpoint.keys())
    assert sum(layer.nbytes for layer in checkpoint.layers) == checkpoint.nbytes


def test_a_plan_names_every_term(layered: Path) -> None:
    checkpoint = onelayer.open(layered)
    plan = checkpoint.plan(budget="8MiB", window=1)
    assert plan.budget == 8 << 20
    assert sum(size for _, size in plan.terms) == plan.host_bytes <= plan.budget
    assert plan.min_budget == checkpoint.min_budget
    assert plan.nbytes == checkpoint.nbytes
    assert plan.layers == [layer.name for layer in checkpoint.layers]
    assert plan.resident_bytes >= max(layer.nbytes for layer in checkpoint.layers)
    assert "ring" in str(plan)


def test_a_budget_that_cannot_work_is_refused_with_one_that_does(layered: Path) -> None:
    checkpoint = onelayer.open(layered)
    for start in (checkpoint.plan, checkpoint.stream):
        with pytest.raises(onelayer.BudgetError) as caught:
            start(budget="1MiB")
        assert isinstance(caught.value, ValueError)
        assert (caught.value.budget, caught.value.tensor) == (1 << 20, None)
        assert caught.value.required == checkpoint.min_budget
    checkpoint.stream(budget=checkpoint.min_budget).close()
    with pytest.raises(onelayer.BudgetError) as caught:
        checkpoint.plan(device_budget="4KiB")
    assert caught.value.budget == 4096 < caught.value.required


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device"),
        ({"order": "random"}, "order"),
        ({"io": "floppy"}, "io"),
        ({"dtype": "f8"}, "dtype"),
        ({"window": 0}, "window"),
        ({"window": "some"}, "window"),
        ({"budget": "many"}, "size"),
        ({"on_stall": -1.0}, "on_stall"),
        ({"select": "no such name"}, "selection"),
    ],
)
def test_options_are_checked(layered: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onelayer.open(layered).plan(**options)


def test_unknown_options_are_type_errors(layered: Path) -> None:
    with pytest.raises(TypeError, match="prefetching"):
        onelayer.open(layered).plan(prefetching=2)


def test_a_missing_path_is_not_found(tmp_path: Path) -> None:
    for source in (tmp_path / "nothing", str(tmp_path / "nothing"), "no/such/thing"):
        with pytest.raises(FileNotFoundError) as caught:
            onelayer.open(source)
        assert caught.value.filename == os.fspath(source)
    with pytest.raises(FileNotFoundError, match="no weights"):
        onelayer.open(tmp_path)


def test_a_broken_file_names_path_and_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "cut.safetensors", {"a": ("U8", (8,)), "b": ("U8", (8,))})
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(onelayer.CheckpointError, match="3 bytes short") as caught:
        onelayer.open(path)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.path, caught.value.tensor) == (str(path), "b")

    (tmp_path / "text.safetensors").write_text("<html>")
    with pytest.raises(onelayer.CheckpointError, match="HTML") as caught:
        onelayer.open(tmp_path / "text.safetensors")
    assert caught.value.tensor is None


def test_a_name_is_looked_up_in_the_cache_of_the_hub(
    layered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = tmp_path / "hub" / "models--org--name"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (snapshot / "model.safetensors").symlink_to(layered)
    assert len(onelayer.open("org/name", cache_dir=tmp_path / "hub")) == 18
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert len(onelayer.open("org/name")) == 18
    assert len(onelayer.open("org/name", revision=commit)) == 18
    assert len(onelayer.open(f"org/name@{commit}")) == 18
    with pytest.raises(FileNotFoundError, match="other"):
        onelayer.open("org/name", revision="other")
    with pytest.raises(ValueError, match="another one"):
        onelayer.open("org/name@main", revision="other")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("512Mi", 512 << 20),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("10G", 10**10),
        ("1kB", 1000),
        ("0.1KiB", 102),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert onelayer.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1m", "1iB", "1ki", "-1", "1e3", "1.", "19000000TB", True, -1, 1.5, None])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        onelayer.parse_size(text)  # type: ignore[arg-type]


def test_every_type_is_described(every_dtype: Path) -> None:
    checkpoint = onelayer.open(every_dtype)
    for dtype, bits in BITS.items():
        info = checkpoint.info(f"t.{dtype}")
        assert (info.dtype, info.shape, info.nbytes) == (dtype, (3, 8), 3 * bits)
