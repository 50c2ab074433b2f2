"""A small GPT-2 with Hugging Face's Trainer, whose collectives are those of the named backend.

    hvdrun -np 2 python examples/transformers_char_gpt.py
    torchrun --nproc-per-node 2 examples/transformers_char_gpt.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from char_gpt import Text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="hvdlite")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=16, help="per rank")
parser.add_argument("--lr", type=float, default=0.002)


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of text, as many as the steps of all ranks need."""

    def __init__(self, text: Text, count: int) -> None:
        self.inputs = text.batch(0, 0, count)[0]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.inputs[index]}  # the model shifts labels itself


def main(args: argparse.Namespace) -> None:
    # On the CPU, TrainingArguments(ddp_backend=...) accepts no backend but Gloo and MPI. A group that exists is taken.
    dist.init_process_group(args.backend)
    torch.manual_seed(42)
    text = Text()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=text.characters, n_positions=text.context, n_embd=128, n_layer=4, n_head=4,
                                       bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as directory:
        settings = TrainingArguments(
            directory, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr, lr_scheduler_type="constant", ddp_find_unused_parameters=False, save_strategy="no",
            logging_strategy="no", report_to="none", disable_tqdm=True)
        trainer = Trainer(model, settings, train_dataset=Windows(text, args.steps * args.batch_size * settings.world_size))
        trained = trainer.train()
        model.eval()
        inputs, _ = text.validation()
        with torch.no_grad():
            loss = model(inputs, labels=inputs).loss.item()
        if trainer.is_world_process_zero():
            milliseconds = 1000 * trained.metrics["train_runtime"] / trained.global_step
            print(f"step {trained.global_step}: {milliseconds:.0f} ms a step on {settings.world_size} ranks, "
                  f"validation loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
