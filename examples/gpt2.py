"""GPT-2 from transformers, embedding and head tied across the stages, on Python's own source code.

python examples/gpt2.py --stages 4 --layers 12 --width 768 --text book.txt
"""

import argparse
import inspect
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--stages", type=int, default=4)
arguments.add_argument("--layers", type=int, default=4)
arguments.add_argument("--width", type=int, default=64)
arguments.add_argument("--context", type=int, default=64)
arguments.add_argument("--steps", type=int, default=60)
arguments.add_argument("--text", type=Path, help="any file; by default the source of inspect.py")
args = arguments.parse_args()

torch.manual_seed(0)
text = args.text.read_bytes() if args.text else inspect.getsource(inspect).encode()
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # a token is a byte
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256,
        n_positions=args.context,
        n_layer=args.layers,
        n_embd=args.width,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
)

parts = st.partition(model, args.stages)
print(parts.cut)
pipe = st.Pipeline(
    parts, lambda parameters: st.optim.AdamW(parameters, lr=3e-3), loss_fn=parts.loss_fn
)


def batch(size: int = 16) -> dict[str, torch.Tensor]:
    starts = torch.randint(len(tokens) - args.context, (size, 1))
    ids = tokens[starts + torch.arange(args.context)]
    return {"input_ids": ids, "labels": ids}


for result in pipe.run(batch() for _ in range(args.steps)):
    if result.index % 10 == 0:
        print(result.index, f"{result.loss.item():.3f} nats a byte")
print(pipe.evaluate([batch() for _ in range(4)]))

pipe.release()  # the model has its weights in storage of its own again, tied
model.save_pretrained("gpt2-bytes")
