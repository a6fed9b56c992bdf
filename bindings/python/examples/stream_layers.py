"""Streams a checkpoint layer by layer and sums its values: `python stream_layers.py CHECKPOINT [BUDGET]`."""

import sys

import onelayer


def main(source: str, budget: str = "16MiB") -> None:
    checkpoint = onelayer.open(source)
    print(f"{len(checkpoint)} tensors, {checkpoint.nbytes} bytes; the smallest budget is {checkpoint.min_budget}")
    with checkpoint.stream(budget=budget, window=1) as stream:
        for layer in stream:
            with layer:  # releases this layer before the next one
                arrays = {name: tensor.numpy() for name, tensor in layer.items()}
                mean = {name: float(array.astype("float32").mean()) for name, array in arrays.items()}
                del arrays
            print(f"{layer.name}: {len(mean)} tensors, largest mean {max(mean.values()):.4f}")
    print(stream.report)


if __name__ == "__main__":
    main(*sys.argv[1:])
