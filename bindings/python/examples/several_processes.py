"""Each rank reads a share and sends it to the others: `torchrun --nproc-per-node 4 several_processes.py CHECKPOINT`."""

import sys

import torch.distributed as dist

import onelayer
import onelayer.distributed


def main(source: str) -> None:
    dist.init_process_group("gloo")
    nbytes = 0
    with onelayer.distributed.tensors(onelayer.open(source), budget="64MiB") as shared:
        for _name, tensor in shared:
            nbytes += tensor.numel() * tensor.element_size()
        own = shared.report.nbytes if shared.report else 0
    # In one piece with its line break: ranks write to the same pipe.
    sys.stdout.write(f"rank {dist.get_rank()}: has {nbytes} bytes, read {own} of them\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
