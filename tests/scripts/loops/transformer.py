"""Trains a model of ``transformers`` with tied embeddings, in bfloat16 autocast.

Gradients of two batches are accumulated, then reduced, clipped and applied; the learning rate
follows a schedule.
"""

import horovod.torch as hvd
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

PASSES = 2


def train(steps=40, tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=PASSES,
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, 3, steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    generator = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(PASSES):
            tokens = torch.randint(120, (2, 12), generator=generator)
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / PASSES).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
    return dict(model.named_parameters())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train()
    if hvd.rank() == 0:
        print("the loop is complete")
