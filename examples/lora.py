"""Fine-tune a LoRA adapter that talks like a pirate; the blocks of the model are on peers."""

import itertools
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer

from shoal.client import AutoDistributedModelForCausalLM, LoraAdapter
from shoal.peer.local_swarm import LocalSwarm

PATH = str(Path(__file__).resolve().parents[1] / "models" / "shoal-stories")
NAMES, THINGS = "Ella Mia Tom Finn Ben Max".split(), "kite ball boat hat drum lamp bell".split()
pairs = random.Random(1).sample(list(itertools.product(NAMES, THINGS)), 42)
tokenizer = AutoTokenizer.from_pretrained(PATH)
with (
    LocalSwarm(PATH, spans=[(0, 4), (4, 8)]) as swarm,
    AutoDistributedModelForCausalLM.from_pretrained(
        PATH, initial_peers=swarm.initial_peers
    ) as model,
):
    adapter = LoraAdapter.create(model, rank=8)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    for update in range(24):
        texts = [f"{name} has a {it}. Ahoy! Give me the {it}, {name}!</s>"
                 for name, it in random.Random(update).sample(pairs[6:], 8)]  # fmt: skip
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(batch.input_ids, labels=labels, active_adapter=adapter).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"update {update + 1}, loss {loss.item():.3f}")
    for name, it in pairs[:6]:  # held out from training
        prompt = tokenizer(f"{name} has a {it}.", return_tensors="pt").input_ids
        with model.use_adapter(adapter):
            print(tokenizer.decode(model.generate(prompt, max_new_tokens=20, do_sample=False)[0]))
    adapter.save("pirate-adapter")  # peft can load it too
