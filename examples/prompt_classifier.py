"""Train a soft prompt and a head to tell glad sentences from sad ones, over blocks on peers."""

import itertools
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer

from shoal.client import AutoDistributedModelForSequenceClassification
from shoal.peer.local_swarm import LocalSwarm

PATH = str(Path(__file__).resolve().parents[1] / "models" / "shoal-stories")
SAD = "{} has lost the {}.|{} cried because the {} was gone.|{} was afraid of the {}."
GLAD = "{} found the {} and smiled.|{} laughed and shared the {}.|{} was happy with the {}."
NAMES, THINGS = "Ella Mia Tom Finn Ben Max".split(), "kite ball boat hat drum lamp bell".split()
sentences = [(form.format(*pair), label) for label, forms in enumerate((SAD, GLAD))
             for form in forms.split("|") for pair in itertools.product(NAMES, THINGS)]  # fmt: skip
random.Random(1).shuffle(sentences)
torch.manual_seed(1)
tokenizer = AutoTokenizer.from_pretrained(PATH)
with (
    LocalSwarm(PATH, spans=[(0, 4), (4, 8)]) as swarm,
    AutoDistributedModelForSequenceClassification.from_pretrained(
        PATH, num_labels=2, tuning_mode="ptune", pre_seq_len=8, initial_peers=swarm.initial_peers
    ) as model,
):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    for step in [f"update {number}" for number in range(1, 41)] + ["unseen sentences"]:
        is_last = step.startswith("unseen")
        chosen = sentences[:40] if is_last else random.Random(step).sample(sentences[40:], 8)
        labels = torch.tensor([label for _, label in chosen])
        batch = tokenizer([text for text, _ in chosen], padding=True, return_tensors="pt")
        output = model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels)
        num_right = int((output.logits.argmax(-1) == labels).sum())
        print(f"{step}: loss {output.loss.item():.3f}, {num_right}/{len(chosen)} right")
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
