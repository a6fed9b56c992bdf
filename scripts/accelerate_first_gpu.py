#!/usr/bin/env python3
"""Runs accelerate's infer_auto_device_map, for crates/fit/tests/fit/inventories.rs.

Reads one JSON object per line from stdin: `name`, `tensors` (name -> shape), `no_split` (paths of modules
that stay whole), `limit_bytes` of the first GPU. Builds the module tree on the meta device with f16
tensors, and writes one line of JSON each: `name`, `first_gpu_bytes`.
"""

import json
import sys

import torch
from accelerate import infer_auto_device_map


class Whole(torch.nn.Module):
    """A module that its author does not split."""


class Part(torch.nn.Module):
    """Any other module."""


def build(tensors, no_split):
    root = Part()
    for name, shape in tensors.items():
        *path, last = name.split(".")
        module = root
        for depth, part in enumerate(path, 1):
            if part not in module._modules:
                kind = Whole if ".".join(path[:depth]) in no_split else Part
                module.add_module(part, kind())
            module = module._modules[part]
        empty = torch.empty(shape, dtype=torch.float16, device="meta")
        module.register_parameter(last, torch.nn.Parameter(empty, requires_grad=False))
    return root


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        model = build(asked["tensors"], set(asked["no_split"]))
        limits = {0: asked["limit_bytes"], "cpu": 1 << 50}
        device_map = infer_auto_device_map(model, limits, no_split_module_classes=["Whole"], dtype=torch.float16)

        def is_on_first_gpu(name):
            while name not in device_map and name:
                name = name.rpartition(".")[0]
            return device_map[name] == 0

        used = sum(2 * tensor.numel() for name, tensor in model.named_parameters() if is_on_first_gpu(name))
        print(json.dumps({"name": asked["name"], "first_gpu_bytes": used}), flush=True)


main()
