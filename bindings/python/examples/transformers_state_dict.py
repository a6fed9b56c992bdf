"""Loads a transformers model with onelayer: `python transformers_state_dict.py CHECKPOINT [owned|mapped]`."""

import sys

import transformers

import onelayer


def main(source: str, mode: str = "owned") -> None:
    config = transformers.AutoConfig.from_pretrained(source)
    architecture = getattr(transformers, config.architectures[0])
    weights = onelayer.open(source).state_dict(mode=mode)
    model = architecture.from_pretrained(None, config=config, state_dict=weights)
    print(f"{type(model).__name__}: {sum(parameter.numel() for parameter in model.parameters())} parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
