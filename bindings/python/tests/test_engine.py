"""Options that reach the engine: callbacks, hashes, shares, splits, layer maps, and how files are opened."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import onelayer
from checkpoints import FIXTURES

LLAMA = FIXTURES / "llama"


def test_callbacks_get_the_times_of_layers_and_passes() -> None:
    layers: list[onelayer.LayerTimes] = []
    passes: list[onelayer.PassTimes] = []
    with onelayer.open(LLAMA).stream(passes=2, on_layer=layers.append, on_pass=passes.append) as stream:
        for layer in stream:
            layer.close()
    assert [times.name for times in layers] == 2 * stream.plan.layers
    assert [times.pass_number for times in passes] == [0, 1]
    assert all(times.handed_out_seconds >= times.opened_seconds for times in layers)
    assert all((times.released_seconds or 9) >= times.handed_out_seconds for times in layers)
    assert set(passes[0].waits) == {"disk", "fill", "link", "engine"} and "pass 1" in repr(layers[-1])


def test_an_exception_of_a_callback_ends_the_loop() -> None:
    def fail(times: onelayer.LayerTimes) -> None:
        raise LookupError(times.name)

    stream = onelayer.open(LLAMA).stream(on_layer=fail)
    with pytest.raises(LookupError):
        for layer in stream:
            layer.close()
    with pytest.raises(LookupError):
        onelayer.load(LLAMA, on_pass=lambda times: {}["none"])
    del stream


def test_a_stream_with_callbacks_may_be_dropped_at_any_time() -> None:
    for taken in range(4):
        stream = onelayer.open(LLAMA).stream(window="all", on_layer=lambda times: None)
        for _ in range(taken):
            next(stream).close()
        del stream


def test_hashes_are_the_same_everywhere() -> None:
    checkpoint = onelayer.open(LLAMA)
    kept = {name: tensor.hash() for name, tensor in onelayer.load(checkpoint).items()}
    seen = {}
    with checkpoint.stream(device="none", hash=True) as stream:
        for layer in stream:
            seen.update({name: tensor.hash() for name, tensor in layer.items()})
            layer.close()
    assert kept == seen and len(next(iter(seen.values()))) == 64
    with checkpoint.stream(device="none") as stream, pytest.raises(ValueError, match="hash=True"):
        next(next(stream).values().__iter__()).hash()


def test_shares_are_whole_tensors_and_all_of_them() -> None:
    checkpoint = onelayer.open(LLAMA)
    shares = [set(onelayer.load(checkpoint, share=(rank, 2))) for rank in (0, 1)]
    assert shares[0] | shares[1] == set(checkpoint) and not shares[0] & shares[1]
    with pytest.raises(ValueError, match="exclude each other"):
        checkpoint.plan(share=(0, 2), shard=(0, 2))


def test_a_split_divides_fused_blocks_and_ranges() -> None:
    checkpoint = onelayer.open(LLAMA)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = onelayer.load(checkpoint)[name].numpy()
    rows = whole.shape[0]

    def part(split: onelayer.Split) -> object:
        return onelayer.load(checkpoint, shard=(1, 2), rules={r"layers\.0\.mlp\.up_proj": split})[name].numpy()

    half, quarter = rows // 2, rows // 4
    fused = part(onelayer.Split(0, blocks=2))
    expected = [*whole[quarter:half].tobytes(), *whole[half + quarter :].tobytes()]
    assert list(fused.tobytes()) == expected  # type: ignore[attr-defined]
    assert part(onelayer.Split(0, range=(3, 7))).tobytes() == whole[3:7].tobytes()  # type: ignore[attr-defined]
    assert part(onelayer.Split(0, multiple=8)).tobytes() == whole[half:].tobytes()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="one of blocks, multiple and range"):
        onelayer.Split(0, blocks=2, range=(0, 1))


def test_layer_maps_come_from_a_file_or_a_dictionary(tmp_path: Path) -> None:
    checkpoint = onelayer.open(LLAMA)
    rules = {"groups": {'the "head"': ["model.norm", "lm_head"]}, "order": ["model.embed_tokens"]}
    layers = checkpoint.plan(layer_map=rules).layers
    assert layers[-1] == 'the "head"' and [layer.name for layer in checkpoint.layers_by(rules)] == layers
    file = tmp_path / "layers.toml"
    file.write_text('[groups]\nhead = ["model.norm", "lm_head"]\n')
    assert checkpoint.plan(layer_map=file, keep="outside").layers[-1] == "head"
    with pytest.raises(ValueError, match="layer map, line 1"):
        checkpoint.plan(layer_map={"stack": ["a"]})


def test_how_files_are_opened(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 3]}}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    with pytest.raises(onelayer.CheckpointError):
        onelayer.open(file)
    assert onelayer.open(file, allow_opaque_dtypes=True).info("x").dtype == "Q9"
    with pytest.raises(onelayer.CheckpointError):
        onelayer.open(file, allow_opaque_dtypes=True, header_bytes_max=10)
