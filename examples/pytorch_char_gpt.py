"""Train a small character GPT with gradient accumulation, bfloat16 and learning-rate warm-up; then it writes a line.

    hvdrun -np 2 python examples/pytorch_char_gpt.py
    hvdrun -np 2 python examples/pytorch_char_gpt.py --batch-size 32 --passes 1 --precision fp32
"""

from __future__ import annotations

import argparse
import time

import torch
from char_gpt import CharGPT, Text, loss_of
from torch.optim import lr_scheduler

import hvdlite_torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer (default: 200)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and backward pass (default: 8)")
    parser.add_argument("--passes", type=int, default=4, help="backward passes before each step (default: 4)")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of matrix products (default: bf16)")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate (default: 0.002)")
    parser.add_argument("--warmup-steps", type=int, default=20, help="in which the rate rises linearly (default: 20)")
    parser.add_argument("--report-every", type=int, default=50, help="steps between validations (default: 50)")
    parser.add_argument("--generate", type=int, default=200, help="characters to write at the end (default: 200)")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


@torch.no_grad()
def generated(model: CharGPT, text: Text, start: str, count: int, device: torch.device) -> str:
    """Return `start`, and `count` characters that the model draws to follow it."""
    tokens = [text.alphabet.index(character) for character in start]
    for _ in range(count):
        logits = model(torch.tensor([tokens[-text.context:]], device=device))[-1]
        tokens.append(int(torch.multinomial(torch.softmax(logits.float() / 0.8, 0), 1)))
    return "".join(text.alphabet[token] for token in tokens)


def main() -> None:
    args = arguments()
    hvd.init()
    cuda = torch.cuda.device_count() >= hvd.local_size()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)
    text = Text()
    model = CharGPT(text.characters).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         backward_passes_per_step=args.passes)  # gradients travel once a step
    warmup, steps = max(1, args.warmup_steps), args.steps  # a linear warm-up, then a cosine down to a tenth
    scheduler = lr_scheduler.SequentialLR(optimizer, [
        lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1),
        lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup), eta_min=args.lr / 10)], [warmup])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

    validation = [tensor[hvd.rank()::hvd.size()].to(device) for tensor in text.validation(64 // hvd.size() * hvd.size())]
    started = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        for number in range(args.passes):
            inputs, targets = text.batch(step * args.passes + number, hvd.rank(), args.batch_size)
            with autocast:
                loss = loss_of(model, inputs.to(device), targets.to(device))
            (loss / args.passes).backward()  # passes add up: this makes it the mean
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the gradients of all ranks: they are final here
        optimizer.step()
        scheduler.step()
        hvd.record_step(args.batch_size * args.passes)  # for hvdrun --monitor, --scaling and --sweep
        if (step + 1) % args.report_every == 0 or step + 1 == args.steps:
            with torch.no_grad(), autocast:
                loss = hvd.allreduce(loss_of(model, *validation).float(), name="validation")
            if hvd.rank() == 0:
                characters = (step + 1) * args.passes * args.batch_size * text.context * hvd.size()
                print(f"step {step + 1}: validation loss {loss:.3f}, {characters / (time.perf_counter() - started):.0f} "
                      f"characters/s on {hvd.size()} ranks", flush=True)
    if hvd.rank() == 0:
        written = generated(model, text, "The ", args.generate, device)
        print(f"it writes: {' '.join(written.split())}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
